"""The schedule's own keys: those it has, those it wants, and what they may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.conftest import BASE, parse, refusal


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("lr_scheduler_kwargs: {num_cycles: 2}", "lr_scheduler_kwargs: linear has no num_cycles; leave this key out"),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {cycles: 2}", "it has lr_end, power"),
        ("lr_scheduler_type: cosine_with_min_lr", "needs lr_scheduler_kwargs with min_lr or min_lr_rate"),
        ("lr_scheduler_type: warmup_stable_decay", "needs lr_scheduler_kwargs with num_decay_steps"),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: 1}", "it must be below learning_rate"),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: much}", 'power is "much"'),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 0, min_lr_rate: 0}", "keep one"),
        ("lr_scheduler_type: inverse_sqrt\nlr_scheduler_kwargs: {timescale: 0.5}", "timescale is 0.5"),
        ("lr_scheduler_type: linear\ncosine_min_lr_ratio: 0.1", "it is for lr_scheduler: cosine"),
        ("lr_scheduler_kwargs: 3", "it must be a mapping of the schedule's own keys, or null"),
        ("lr_scheduler_type: reduce_lr_on_plateau", "it must be one of linear, cosine, constant"),
    ],
)
def test_what_a_schedule_cannot_do_is_one_line(lines: str, words: str, folder: Path) -> None:
    error = refusal(BASE + lines, folder)
    assert len(error.numbers) == 1 and words in error.numbers[0], error.numbers


def test_keys_of_a_schedule_that_say_nothing_may_stay(folder: Path) -> None:
    assert parse("lr_scheduler_kwargs: {}\ncosine_min_lr_ratio:\n", folder) == parse("", folder)

"""What is told of runs that are shorter than their job says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.job.length import notes_on_length
from planner.job.schema import Job

TEXT = "model: tiny\ndataset: few.jsonl\nper_device_train_batch_size: 4\n"


@pytest.fixture
def few(folder: Path) -> Path:
    (folder / "few.jsonl").write_text('{"text": "a"}\n' * 6)
    return folder


def notes(few: Path, lines: str = "") -> tuple[str, ...]:
    return notes_on_length(Job.parse(TEXT + lines, few))


def test_data_of_fewer_records_than_a_step_has_rows_are_told(few: Path) -> None:
    assert notes(few) == ()
    assert notes(few, "gradient_accumulation_steps: 2") == (
        "a step has 8 rows, and the data 6 records: each step sees some of them more than once; give more data, or a "
        "smaller batch.",
    )
    assert "a step has 4 rows, and the data 1 record:" in notes(few, "max_samples: 1")[0]
    assert len(notes(few, "packing: true\ngradient_accumulation_steps: 2")) == 1


@pytest.mark.parametrize("more", ["packing: wrapped", "long_rows: split"])
def test_records_that_may_be_several_rows_are_not(few: Path, more: str) -> None:
    assert notes(few, f"gradient_accumulation_steps: 2\n{more}") == ()


def test_data_that_are_many_or_of_the_hub_are_left_to_the_jobs_turn(few: Path) -> None:
    auto = "train_batch_size: 5000\n"
    text = TEXT.replace("per_device_train_batch_size: 4\n", auto)
    for count, told in ((6, 1), (2000, 0)):
        (few / "few.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(count)))
        assert len(notes_on_length(Job.parse(text, few))) == told
    assert notes_on_length(Job.parse(text.replace("few.jsonl", "[few.jsonl, owner/set]"), few)) == ()


def test_a_warmup_as_long_as_the_run_is_told(few: Path) -> None:
    said = (
        "warmup_steps is {}, and the run has {} steps: the rate only rises and never reaches learning_rate; below 1 "
        "it is a share of all steps, such as 0.1."
    )
    assert notes(few, "warmup_steps: 5") == (said.format(5, 5),)  # 3 epochs of 1.5 steps
    for none in ("warmup_steps: 4", "warmup_steps: 0.9", "warmup_steps: 9\nlr_scheduler_type: constant"):
        assert notes(few, none) == ()
    _, told = Job.parse_with_notes(TEXT + "warmup_steps: 100\nmax_steps: 40", few)
    assert told[-1] == said.format(100, 40)
    assert notes(few, "warmup_steps: 100\nmax_steps: 40") == (), "told once"
    _, told = Job.parse_with_notes(TEXT + "warmup_steps: 39\nmax_steps: 40", few)
    assert not any("warmup_steps" in note for note in told)

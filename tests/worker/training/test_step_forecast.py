"""How long a step should take whose slices are shorter than the plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.schedule.compile import OpKind, compile_program
from planner.schedule.plan import Plan
from planner.schedule.simulate import durations_s
from tests.support.chains import HARDWARE, chain, mixed_plan, resident_plan, rounds_plan
from worker.training.step_forecast import StepForecast


def batches(*lengths: int) -> list[dict[str, torch.Tensor]]:
    rows = (torch.zeros(2, length, dtype=torch.int64) for length in lengths)
    return [{"input_ids": each, "labels": each} for each in rows]


def test_full_slices_take_what_the_plan_says() -> None:
    plan = replace(mixed_plan(slices=2), step_s=7.0)
    assert StepForecast(plan, chain(), HARDWARE, 128).step_s(batches(64, 64)) == 7.0


def test_where_nothing_moves_a_step_takes_time_by_its_tokens() -> None:
    computing, updates = 0.2 + 2 * 3 + 1.0, 801 / 10000
    forecast = StepForecast(resident_plan(chain(), slices=2), chain(), HARDWARE, 128)
    assert forecast.step_s(batches(64, 16)) == pytest.approx(computing * (1 + 1 / 4) + updates)
    assert forecast.step_s(batches(16, 16)) == pytest.approx(computing * (1 / 4 + 1 / 4) + updates)


def test_where_links_are_slow_short_rows_do_not_help_the_weights() -> None:
    slow = replace(HARDWARE, cpu_memory_bytes_per_s=10.0)
    full, short = (StepForecast(mixed_plan(), chain(), slow, 128).step_s(batches(length)) for length in (32, 16))
    activations = 2 * 500  # offloaded by a full slice, there and back
    assert full - short == pytest.approx(activations / 4 / 10)


@pytest.mark.parametrize("plan", [mixed_plan(slices=2), rounds_plan()], ids=["one round", "two rounds"])
def test_each_slice_has_its_own_length_and_weights_travel_as_ever(plan: Plan) -> None:
    program = compile_program(plan, chain())
    shares = [1 / 2 ** (k + 1) for k in range(plan.slices * plan.rounds)]
    before, after = durations_s(program, chain(), HARDWARE), durations_s(program, chain(), HARDWARE, shares)
    for op, full, taken in zip(program.ops, before, after, strict=True):
        own = op.kind is OpKind.RUN or op.subject.startswith("a:")
        assert taken == pytest.approx(full * (shares[plan.slices * op.round + op.turn[2]] if own else 1)), op.name

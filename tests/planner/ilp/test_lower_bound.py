"""The lower bound with clipping, on a chain small enough to solve by hand.

That of `tests.planner.ilp.test_oilp`: two layers of 25 parameters, stages of one second each, seven in all; the last
four of them come after the norm's updates and before the next norm. Nothing has room on the device at block 0's
backward, and the CPU takes two seconds for each layer's update.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp.lower_bound import lower_bound_s
from planner.schedule.peak_moments import LOSS_BYTES, NORM_BYTES
from planner.search.problem import Problem
from tests.planner.ilp.test_oilp import MACHINE, PLENTY, chain
from tests.support.chains import HARDWARE
from tests.support.chains import chain as small_chain

SLOW = replace(MACHINE, cpu_update_parameters_per_s=12.5, h2d_bytes_per_s=10**4, d2h_bytes_per_s=10**4)
FULL = 800  # bytes of the host for weights, gradients and states alone


def bound_s(*, cpu_bytes: int, clip: bool, rounds: int = 1) -> float:
    budgets = Budgets(gpu_bytes=rounds * LOSS_BYTES + 2 * NORM_BYTES, cpu_bytes=cpu_bytes)
    setting = Setting(
        chain=chain(trainable=True),
        hardware=SLOW,
        budgets=budgets,
        slices=1,
        clip=clip,
        rounds=rounds,
    )
    return lower_bound_s(setting)


def test_what_waits_for_the_norm_is_updated_after_the_backward_and_before_the_heads_turn():
    assert bound_s(cpu_bytes=FULL, clip=True) == pytest.approx(4 + 4)
    assert bound_s(cpu_bytes=FULL, clip=False) == pytest.approx(7)


def test_in_rounds_the_others_come_in_between_as_a_whole():
    assert bound_s(cpu_bytes=FULL, clip=True, rounds=3) == pytest.approx(4 + 4 + 2 * 7)


def test_an_update_ahead_relieves_the_window_and_costs_the_cpu_more():
    # Of a seconds of updates ahead, 40/28 a are done in the backward, and half as much once more in the window.
    a = 2.8  # where both take as long: less waits longer, more keeps the CPU longer
    window, cpu = 4 + (4 - a) + 0.5 * 40 / 28 * a, (4 - a) + 1.5 * 40 / 28 * a
    assert window == pytest.approx(cpu) == pytest.approx(7.2)
    assert bound_s(cpu_bytes=PLENTY, clip=True) == pytest.approx(7.2)


def test_memory_for_updates_ahead_is_the_hosts():
    """A layer's master and moments once more are 300 bytes: for 100 a sixth of the four seconds may run ahead."""
    a = 4 / 6
    assert bound_s(cpu_bytes=FULL + 100, clip=True) == pytest.approx(8 - a + a * 40 / 28 / 2)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("host", [30_000, 10**6])
@pytest.mark.parametrize("slices", [1, 2])
def test_no_plan_beats_it_whatever_runs_ahead(host, slices):
    machine = replace(HARDWARE, h2d_bytes_per_s=4000.0, d2h_bytes_per_s=4000.0, cpu_update_parameters_per_s=150.0)
    plan = Problem(
        chain=small_chain(6),
        hardware=machine,
        gpu_budget_bytes=9000,
        cpu_budget_bytes=host,
        slices=slices,
        clip=True,
    ).plan()
    assert 0 < plan.bound_s <= plan.step_s

"""Where the CPU is the device, copies and updates take cores from computing."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from planner.candidate.setting import Budgets, Setting
from planner.ilp.lower_bound import lower_bound_s
from planner.measure.machine_rates import estimate_hardware, measure_hardware
from planner.schedule.compile import OpKind, Queue, compile_program
from planner.schedule.simulate import durations_s, simulate
from planner.search.problem import Problem
from tests.support.chains import HARDWARE, chain, mixed_plan, resident_plan

SHARED = replace(HARDWARE, shared_compute=0.5)


def test_turns_take_longer_by_a_part_of_what_other_queues_do() -> None:
    program = compile_program(mixed_plan(slices=2), chain())
    alone, shared = durations_s(program, chain(), HARDWARE), durations_s(program, chain(), SHARED)
    others = sum(taken for op, taken in zip(program.ops, alone, strict=True) if op.queue is not Queue.COMPUTE)
    assert others > 0
    assert sum(shared) - sum(alone) == pytest.approx(0.5 * others)
    turns = {op.name for op in program.ops if op.kind is OpKind.RUN}
    longer = {op.name for op, a, b in zip(program.ops, alone, shared, strict=True) if b > a}
    assert longer <= turns


def test_a_turn_is_slowed_by_the_copies_issued_before_it() -> None:
    program = compile_program(mixed_plan(), chain())
    names = [op.name for op in program.ops]
    alone, shared = durations_s(program, chain(), HARDWARE), durations_s(program, chain(), SHARED)
    before, turn = names.index("run@F0:F0.0"), names.index("run@F1:F1.0")
    between = [n for n in range(before, turn) if program.ops[n].queue is not Queue.COMPUTE]
    assert between
    assert shared[turn] - alone[turn] == pytest.approx(0.5 * sum(alone[n] for n in between))


def test_where_nothing_moves_nothing_is_shared() -> None:
    program = compile_program(resident_plan(chain()), chain())
    assert simulate(program, chain(), SHARED).step_s == simulate(program, chain(), HARDWARE).step_s


@pytest.mark.parametrize("clip", [False, True])
def test_no_plan_is_faster_than_its_bound_and_the_solver_knows_of_sharing(clip: bool) -> None:
    found = {}
    for machine in (HARDWARE, SHARED):
        plan = Problem(
            chain=chain(),
            hardware=machine,
            gpu_budget_bytes=9000,
            cpu_budget_bytes=10**6,
            slices=2,
            clip=clip,
        ).plan()
        setting = Setting(
            chain=chain(),
            hardware=machine,
            budgets=Budgets(gpu_bytes=9000, cpu_bytes=10**6),
            slices=2,
            clip=clip,
        )
        bound = lower_bound_s(setting)
        assert bound <= plan.step_s * (1 + 1e-6)
        found[machine] = plan
    assert found[SHARED].lp_step_s > found[HARDWARE].lp_step_s
    assert found[SHARED].step_s > found[HARDWARE].step_s


def test_what_copies_take_of_computing_may_fall_into_the_window_of_waiting_updates() -> None:
    slow = replace(SHARED, h2d_bytes_per_s=40000.0, d2h_bytes_per_s=40000.0, cpu_update_parameters_per_s=150.0)
    plan = Problem(
        chain=chain(6),
        hardware=slow,
        gpu_budget_bytes=9000,
        cpu_budget_bytes=30000,
        slices=1,
        clip=True,
    ).plan()
    assert plan.bound_s <= plan.step_s * (1 + 1e-6)


def test_the_share_is_that_of_the_cores() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        assert estimate_hardware(torch.device("cpu")).shared_compute == 0.5
        torch.set_num_threads(1)
        assert measure_hardware(torch.device("cpu")).shared_compute in (0.0, 0.5)  # of two cores and more; of one
    finally:
        torch.set_num_threads(before)

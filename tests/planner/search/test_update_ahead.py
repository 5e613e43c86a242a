"""The planner's choice of updates ahead of the norm: only where the host has memory, and only where it is faster."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.candidate.candidate import assemble
from planner.candidate.evaluate import predicted_step_s
from planner.candidate.setting import Budgets, Setting
from planner.candidate.update_ahead import ahead_bytes, ahead_of_norm
from planner.greedy.streaming import profile, streamed
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import cpu_parts, cpu_peak_bytes
from planner.schedule.verify import verify
from planner.search.problem import Problem
from tests.support.chains import HARDWARE, chain, with_masters

LAYERS, BUDGET, HOST = 6, 9000, 10**6
FAST_HOST = replace(HARDWARE, cpu_update_parameters_per_s=150.0, h2d_bytes_per_s=4000.0, d2h_bytes_per_s=4000.0)


def candidate_of(clip=True, a_chain=None):
    budgets = Budgets(gpu_bytes=BUDGET, cpu_bytes=HOST)
    setting = Setting(chain=a_chain or chain(LAYERS), hardware=FAST_HOST, budgets=budgets, slices=1, clip=clip)
    return streamed(setting, profile(setting, "recompute"), ahead=True, source="streamed")


def plan_of(candidate):
    return assemble(chain(LAYERS), candidate, slices=1, clip=True)


def test_a_quarter_to_all_of_the_updates_run_ahead_those_first_whose_gradients_come_first():
    ways = [plan_of(way) for way in ahead_of_norm(chain(LAYERS), candidate_of(), rounds=1, host_bytes=HOST)]
    counts = [len(way.ahead()) for way in ways]
    assert counts == sorted(counts) and len(counts) == 4
    assert all(small.ahead() < large.ahead() for small, large in itertools.pairwise(ways))
    assert "h" in ways[0].ahead()
    assert not ways[-1].ahead() & {"e", "l0.a", "l0.b"}  # their gradients come too late to run ahead of anything
    for way in ways:
        assert way.cpu_updated() == plan_of(candidate_of()).cpu_updated()
        verify(compile_program(way, chain(LAYERS)), chain(LAYERS))


@pytest.mark.parametrize("form", ["fp32", "masters", "packed"])
def test_updates_run_ahead_as_far_as_the_host_has_memory(form):
    a_chain = chain(LAYERS) if form == "fp32" else replace(with_masters(chain(LAYERS)), packs=form == "packed")
    candidate = candidate_of(a_chain=a_chain)
    before = cpu_peak_bytes(plan_of(candidate), a_chain)
    for room in (0, 1199, 1200, 1399, 1400, 5000, 10**5):
        *_, last = [candidate, *ahead_of_norm(a_chain, candidate, rounds=1, host_bytes=room)]
        plan = plan_of(last)
        assert cpu_peak_bytes(plan, a_chain) - before == sum(
            ahead_bytes(a_chain, t, 1) for t in a_chain.tensors() if t.name in plan.ahead()
        )
        assert cpu_peak_bytes(plan, a_chain) <= before + room
        # Of the head's 100 parameters master and moments, with masters also the gradient, but where states are packed.
        assert bool(plan.ahead()) == (room >= {"fp32": 1200, "masters": 1400, "packed": 1200}[form])


def test_without_cpu_updates_nothing_runs_ahead():
    everything = streamed(
        Setting(
            chain=chain(2),
            hardware=FAST_HOST,
            slices=1,
            clip=True,
            budgets=Budgets(gpu_bytes=BUDGET, cpu_bytes=HOST, cpu_updates=False),
        ),
        ["keep"] * 4,
        ahead=True,
        source="streamed",
    )
    assert list(ahead_of_norm(chain(2), everything, rounds=1, host_bytes=HOST)) == []


@pytest.mark.parametrize("budget", [BUDGET, 14_000])
def test_the_planner_runs_ahead_where_the_cpu_has_time_and_is_never_slower_for_it(budget):
    a_chain = chain(LAYERS)
    problem = {"gpu_budget_bytes": budget, "slices": 1, "clip": True}
    rich = Problem(chain=a_chain, hardware=FAST_HOST, cpu_budget_bytes=HOST, **problem).plan()
    program = compile_program(rich, a_chain)
    verify(program, a_chain, gpu_budget_bytes=budget)
    assert rich.ahead()
    assert cpu_parts(rich, a_chain).kept_bytes == 12 * sum(
        t.elements for t in a_chain.tensors() if t.name in rich.ahead()
    )
    waits = replace(rich, stages=tuple(_waiting(rich)))
    assert rich.step_s < predicted_step_s(compile_program(waits, a_chain), a_chain, FAST_HOST)


def _waiting(plan):
    """Its stages with all CPU updates behind the norm."""
    *others, last = plan.stages
    yield from (replace(stage, cpu_update=()) for stage in others)
    yield replace(last, cpu_update=tuple(sorted(plan.cpu_updated())))

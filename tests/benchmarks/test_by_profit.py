"""Algorithm 1 of paper 004 on chains small enough to do by hand, and algorithm 2's plans on others."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.by_profit import by_profit
from planner.candidate.candidate import Candidate, assemble
from planner.candidate.setting import Budgets, Setting
from planner.greedy.streaming import profile, resident
from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.compile import Program, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.simulate import simulate
from planner.schedule.verify import verify
from tests.support.random_chains import chains, machines


def layer(name: str, elements: int) -> Block:
    """One tensor of 4 bytes per element without states; a second forward, two backward."""
    tensors = (
        (Tensor(name=name, elements=elements, bytes=4 * elements, gradient_bytes=4 * elements, state_bytes=0),)
        if elements
        else ()
    )
    return Block(name=name, kind=name, tensors=tensors, options=(Option(name="keep", forward_s=1.0, backward_s=2.0),))


def setting(elements: list[int], gpu_bytes: int) -> Setting:
    """Layers of these sizes between an embedding and a head without weights; a layer of 100 moves in 0.1 s."""
    blocks = (layer("embedding", 0), *(layer(f"l{i}", n) for i, n in enumerate(elements)), layer("head", 0))
    machine = Hardware(
        name="test",
        gpu_bytes=gpu_bytes,
        cpu_bytes=10**9,
        h2d_bytes_per_s=4000.0,
        d2h_bytes_per_s=4000.0,
        gpu_update_parameters_per_s=1e12,
        cpu_update_parameters_per_s=1e12,
        cpu_memory_bytes_per_s=1e12,
    )
    budgets = Budgets(gpu_bytes=gpu_bytes, cpu_bytes=10**9, cpu_updates=False)
    return Setting(chain=Chain(blocks=blocks), hardware=machine, budgets=budgets, slices=1, clip=False)


def program_of(candidate: Candidate, problem: Setting) -> Program:
    plan = assemble(problem.chain, candidate, slices=problem.slices, clip=problem.clip)
    return compile_program(plan, problem.chain)


def away(candidate: Candidate | None) -> set[str]:
    assert candidate is not None
    return {schedule.tensor.name for schedule in candidate.schedules if schedule.weight}


def test_nothing_leaves_where_everything_fits():
    problem = setting([100, 100, 100], 10**6)
    assert away(by_profit(problem, profile(problem, "fast"), spare=0)) == set()


def test_the_weight_that_leaves_covers_the_most_excess_per_byte():
    problem = setting([10, 100, 10, 10], 4 * (130 + 100) - 4 * 5)
    # Too much by 20 bytes in the large layer's backward alone, where its gradient is: any other layer's 40 bytes cover
    # that once for the same cost, and of equal profits the first choice is taken.
    assert away(by_profit(problem, profile(problem, "fast"), spare=0)) == {"l0"}


def test_weights_alone_may_not_suffice():
    problem = setting([100, 100], 4 * 150)
    assert by_profit(problem, profile(problem, "fast"), spare=0) is None


def test_one_copy_to_the_host_serves_both_absences():
    problem = setting([100] * 6, 4 * 350)
    candidate = by_profit(problem, profile(problem, "fast"), spare=0)
    assert candidate is not None
    twice = [schedule for schedule in candidate.schedules if len(schedule.weight) == 2]
    assert twice and all(sum(absence.offload is not None for absence in j.weight) == 1 for j in twice)
    verify(program_of(candidate, problem), problem.chain, gpu_budget_bytes=4 * 350)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), share=st.floats(0.3, 1.0), spare=st.integers(0, 2))
def test_every_plan_is_right_and_within_the_budget(chain: Chain, hardware: Hardware, share: float, spare: int) -> None:
    free = Setting(
        chain=chain, hardware=hardware, budgets=Budgets(gpu_bytes=10**9, cpu_bytes=10**9), slices=1, clip=False
    )
    options = profile(free, "fast")
    most = gpu_peak_bytes(program_of(resident(free, options, "resident"), free), chain)
    budget = int(share * most)
    problem = Setting(
        chain=chain, hardware=hardware, budgets=Budgets(gpu_bytes=budget, cpu_bytes=10**9), slices=1, clip=False
    )
    candidate = by_profit(problem, options, spare=spare)
    if candidate is not None:
        verify(program_of(candidate, problem), chain, gpu_budget_bytes=budget)


def test_there_is_no_such_plan_with_clipping():
    problem = setting([100, 100], 10**6)
    clipping = Setting(chain=problem.chain, hardware=problem.hardware, budgets=problem.budgets, slices=1, clip=True)
    assert by_profit(clipping, profile(clipping, "fast"), spare=2) is None


@pytest.mark.parametrize("layers", [6, 12])
def test_transfers_hide_behind_computation(layers):
    problem = setting([100] * layers, 4 * 500)
    candidate = by_profit(problem, profile(problem, "fast"), spare=2)
    assert candidate is not None
    assert simulate(program_of(candidate, problem), problem.chain, problem.hardware).step_s == pytest.approx(
        3 * (layers + 2), rel=0.02
    )

"""The O-ILP of whole tensors: its placements are whole, and it is the O-ILP otherwise."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.yardsticks import greedy_step_s
from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.search.problem import Problem
from planner.search.round_placements import rounded_totals
from tests.support.llama import GB, RTX_3060, llama
from tests.support.per_tensor_ilp import solve_whole
from tests.support.random_chains import chains, machines

UNLIMITED = 10**9


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), clip=st.booleans(), share=st.floats(0.01, 0.6))
def test_what_the_solver_chooses_are_whole_tensors_and_no_better_than_fractions(
    chain: Chain, hardware: Hardware, clip: bool, share: float
) -> None:
    least = (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=0,
            cpu_budget_bytes=UNLIMITED,
            slices=1,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    budgets = Budgets(gpu_bytes=int(least * (1 + share)), cpu_bytes=UNLIMITED)
    instance = make_instance(Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=clip))
    fractions = solve_oilp(instance, gap=1e-6)
    whole = solve_whole(instance, chain, hardware, gap=1e-6)
    if whole is None or fractions is None:  # at the edge of what fits a solver's tolerances decide
        assert whole is None
        return
    assert whole.solution.step_s >= fractions.step_s * (1 - 1e-5) - 1e-9
    totals = rounded_totals(chain, whole.placements)
    for kind, of in whole.solution.totals.of.items():
        assert totals.of[kind] == pytest.approx(of, abs=1e-4 * instance.unit_bytes)


def test_no_plan_of_this_chain_is_slower_than_the_greedy_ones_or_much_above_whole_tensors() -> None:
    chain, budgets = llama(4), Budgets(gpu_bytes=6 * GB, cpu_bytes=100 * GB)
    plan = Problem(
        chain=chain,
        hardware=RTX_3060,
        gpu_budget_bytes=budgets.gpu_bytes,
        cpu_budget_bytes=budgets.cpu_bytes,
        slices=1,
        clip=False,
    ).plan(gap=0.005)
    greedy_s = greedy_step_s(chain, RTX_3060, budgets)
    instance = make_instance(Setting(chain=chain, hardware=RTX_3060, budgets=budgets, slices=1, clip=False))
    whole = solve_whole(instance, chain, RTX_3060, gap=0.005)
    assert greedy_s is not None and whole is not None
    assert plan.step_s <= greedy_s
    assert plan.lp_step_s * 0.995 <= whole.solution.step_s
    assert plan.step_s <= 1.03 * whole.solution.step_s

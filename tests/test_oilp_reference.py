"""The aggregated program against the printed one, which has a column per block and stage."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.chain import Chain
from planner.hardware import Hardware
from planner.instance import Budgets, make_instance
from planner.oilp import solve_oilp
from planner.solve import least_budget
from tests.llama import GB, RTX_3060, llama
from tests.printed_oilp import printed_step
from tests.random_chains import chains, machines

UNLIMITED = 10**9


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
def test_on_a_regular_chain_summing_over_blocks_loses_next_to_nothing(clip: bool, barrier: bool, share: float) -> None:
    chain = llama(6)
    least = least_budget(chain, RTX_3060, cpu_budget_bytes=100 * GB, slices=1, clip=clip).gpu_bytes
    budgets = Budgets(gpu_bytes=int(least * (1 + share)), cpu_bytes=100 * GB, barrier=barrier)
    instance = make_instance(chain, RTX_3060, budgets=budgets, slices=1, clip=clip)
    solution = solve_oilp(instance, time_limit_s=60, gap=1e-5)
    assert solution is not None
    printed = printed_step(instance)
    assert printed is not None
    assert 0.99 * printed <= solution.step_s <= printed * (1 + 1e-4)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(4),
    hardware=machines(),
    slices=st.sampled_from((1, 2, 3)),
    clip=st.booleans(),
    barrier=st.booleans(),
    share=st.floats(-0.2, 0.6),
)
def test_on_irregular_chains_it_is_never_above_the_printed_program_and_little_below(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, barrier: bool, share: float
) -> None:
    least = least_budget(chain, hardware, cpu_budget_bytes=UNLIMITED, slices=slices, clip=clip).gpu_bytes
    budgets = Budgets(gpu_bytes=int(least * (1 + share)), cpu_bytes=UNLIMITED, barrier=barrier)
    instance = make_instance(chain, hardware, budgets=budgets, slices=slices, clip=clip)
    solution = solve_oilp(instance, time_limit_s=60, gap=1e-6)
    printed = printed_step(instance)
    if printed is None:
        assert solution is None
    else:
        assert solution is not None
        assert 0.85 * printed <= solution.step_s + 1e-9  # 8.6% below was seen: sums hide who moves when
        assert solution.step_s <= printed * (1 + 1e-5) + 1e-9

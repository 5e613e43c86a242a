"""What whole tensors cost, and that a second of planning is enough for a plan."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.cases import UNLIMITED, llama3_case, random_case
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor
from planner.search.problem import Problem
from planner.search.round_placements import _subset
from tests.support.llama import GB, RTX_3060, llama
from tests.support.random_chains import chains, machines


@pytest.mark.sweep(5)
@pytest.mark.parametrize("seed", [2, 3, 5, 7, 8, 9, 12, 13, 14, 22])
def test_whole_tensors_cost_at_most_3_percent_on_these_irregular_chains(seed: int) -> None:
    case = random_case(seed)
    plan = Problem(
        chain=case.chain,
        hardware=case.hardware,
        gpu_budget_bytes=case.gpu_bytes,
        cpu_budget_bytes=case.cpu_bytes,
        slices=1,
        clip=False,
    ).plan(gap=0.005)
    assert plan.solver_gap <= 0.005
    assert plan.step_s <= 1.03 * plan.lp_step_s


def test_with_one_second_a_chain_of_82_blocks_has_a_plan_at_the_least_possible_budget() -> None:
    case = llama3_case(82)
    problem = {"cpu_budget_bytes": UNLIMITED, "slices": 1, "clip": False}
    least = Problem(chain=case.chain, hardware=case.hardware, gpu_budget_bytes=0, **problem).least().gpu_bytes
    plan = Problem(chain=case.chain, hardware=case.hardware, gpu_budget_bytes=least, **problem).plan()
    assert plan.gpu_peak_bytes <= least


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), slices=st.sampled_from((1, 2, 4)), clip=st.booleans())
def test_with_one_second_there_is_a_plan_at_the_least_possible_budget(
    chain: Chain, hardware: Hardware, slices: int, clip: bool
) -> None:
    problem = {"cpu_budget_bytes": UNLIMITED, "slices": slices, "clip": clip}
    least = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **problem).least().gpu_bytes
    assert (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=least,
            **problem,
        )
        .plan()
        .gpu_peak_bytes
        <= least
    )


def tensors(*sizes: int) -> list[Tensor]:
    return [
        Tensor(name=f"{n}", elements=size, bytes=size, gradient_bytes=size, state_bytes=2 * size)
        for n, size in enumerate(sizes)
    ]


def sizes(chosen: list[Tensor]) -> list[int]:
    return [t.bytes for t in chosen]


def test_of_a_blocks_tensors_those_are_taken_whose_sum_is_nearest() -> None:
    some = tensors(470, 470, 470, 134, 134, 17, 17)
    assert sizes(_subset(some, 1010, lambda t: t.bytes, up=False)) == [470, 470, 17, 17]
    assert sizes(_subset(some, 760, lambda t: t.bytes, up=True)) == [470, 134, 134, 17, 17]
    assert sizes(_subset(some, 0, lambda t: t.bytes, up=True)) == []
    assert _subset(some, 5000, lambda t: t.bytes, up=True) == some


def test_of_hundreds_of_tensors_a_sum_near_the_target_is_found() -> None:
    some = tensors(*(1000 + 37 * n % 211 for n in range(200)))
    total = sum(sizes(some))
    chosen = _subset(some, total / 3, lambda t: t.bytes, up=True)
    assert total / 3 * 0.9999 <= sum(sizes(chosen)) <= total / 3 * 1.01


def test_on_a_nearly_full_host_with_clipping_whole_tensors_are_found_too() -> None:
    chain = llama(6)
    everything = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in chain.tensors())
    plan = Problem(
        chain=chain,
        hardware=RTX_3060,
        gpu_budget_bytes=6 * GB,
        cpu_budget_bytes=int(0.9 * everything),
        slices=1,
        clip=True,
    ).plan()
    assert plan.source.startswith("o-ilp")
    assert plan.step_s <= 1.05 * plan.lp_step_s

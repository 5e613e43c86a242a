"""The least budgets are found with few candidates evaluated, and are those that trying all of them would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.candidate import Candidate
from planner.candidate.evaluate import device_bytes, host_bytes
from planner.candidate.setting import Budgets, Setting
from planner.greedy import streaming
from planner.greedy.streaming import frugal, profile, resident, streamed
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.search import problem as problem_module
from planner.search.problem import Problem
from tests.support.random_chains import chains, machines

UNLIMITED = 10**9


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(), hardware=machines(), host=st.sampled_from((2000, 6000, UNLIMITED)), slices=st.sampled_from((1, 3))
)
def test_the_frugal_candidate_needs_no_more_than_those_it_is_chosen_from(
    chain: Chain, hardware: Hardware, host: int, slices: int
) -> None:
    setting = Setting(
        chain=chain, hardware=hardware, budgets=Budgets(gpu_bytes=0, cpu_bytes=host), slices=slices, clip=False
    )
    asked: list[Candidate] = []

    def peak(candidate: Candidate) -> int:
        asked.append(candidate)
        return device_bytes(candidate, setting)

    found = frugal(setting, peak, lambda d: host_bytes(d, setting))
    assert len(set(asked)) == len(asked)
    others = [
        resident(setting, profile(setting, "recompute"), ""),
        *(streamed(setting, profile(setting, name), ahead=False, source="") for name in ("recompute", "offload")),
    ]
    fitting = [device_bytes(d, setting) for d in others if host_bytes(d, setting) <= host]
    assert not fitting or (found is not None and device_bytes(found, setting) <= min(fitting))


@given(data=st.data(), falls=st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_the_smallest_count_that_is_enough_is_found_by_few_guesses(data: st.DataObject, falls: list[int]) -> None:
    sizes = [sum(falls[n:]) for n in range(len(falls) + 1)]  # bytes of each count, falling to 0
    budget = data.draw(st.integers(0, sizes[0] + 1))
    guesses: list[int] = []

    def bytes_of(count: int) -> int:
        guesses.append(count)
        return sizes[count]

    found = streaming._fewest(lambda count: count, len(falls), bytes_of, budget)
    right = next(n for n, size in enumerate(sizes) if size <= budget)
    assert found == (right or None)
    assert len(guesses) <= 2 + 2 * len(falls).bit_length()


def test_bytes_in_proportion_take_five_guesses() -> None:
    guesses: list[int] = []

    def bytes_of(count: int) -> int:
        guesses.append(count)
        return 1000 * (1000 - count)

    assert streaming._fewest(lambda count: count, 1000, bytes_of, 311_500) == 689
    assert len(guesses) <= 5


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), share=st.floats(0.0, 1.0), slices=st.sampled_from((1, 2)))
def test_the_least_host_is_near_the_least_that_fits(
    chain: Chain, hardware: Hardware, share: float, slices: int
) -> None:
    near = 20
    asked = Problem(
        chain=chain, hardware=hardware, gpu_budget_bytes=0, cpu_budget_bytes=UNLIMITED, slices=slices, clip=False
    )
    least = asked.least_bytes()
    assert least is not None
    asked = replace(asked, gpu_budget_bytes=int(least * (1 + share)), cpu_budget_bytes=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problem_module, "_NEAR_BYTES", near)
        host = asked.least_cpu_bytes()
    assert host is not None
    assert replace(asked, cpu_budget_bytes=host).fits()
    standing = max(0, asked.standing_bytes() - asked.gpu_budget_bytes)  # weights and states that no GPU budget holds
    assert host - near <= standing or not replace(asked, cpu_budget_bytes=host - near).fits()

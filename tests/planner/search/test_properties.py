"""Whatever the chain, the machine and the budget: the planner's plan is right, fits, and is no worse than greedy.
Some tests take seconds: they solve the integer program of a model, or many small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.candidate import Candidate, assemble
from planner.candidate.evaluate import device_bytes, host_bytes, predicted_step_s
from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.greedy.streaming import candidates, frugal
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import Program, compile_program
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes
from planner.schedule.verify import verify
from planner.search.make_plan import in_rounds, least_gpu_bytes, rounds_that_fit
from planner.search.problem import Problem
from tests.support.random_chains import chains, machines

UNLIMITED = 10**9


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    slices=st.sampled_from((1, 2, 3, 5)),
    clip=st.booleans(),
    share=st.floats(0.0, 1.2),
    cpu_updates=st.sampled_from((True, True, False)),
    activation_offload=st.sampled_from((True, True, False)),
)
def test_every_plan_is_right_fits_and_is_no_slower_than_the_greedy_ones(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, share: float, cpu_updates: bool, activation_offload: bool
) -> None:
    freedom = {"cpu_updates": cpu_updates, "activation_offload": activation_offload}
    least = (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=0,
            cpu_budget_bytes=UNLIMITED,
            slices=slices,
            clip=clip,
            **freedom,
        )
        .least()
        .gpu_bytes
    )
    most = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in chain.tensors()) + 3000 * slices * len(chain.blocks)
    budget = least + int(share * max(0, most - least))
    plan = Problem(
        chain=chain,
        hardware=hardware,
        gpu_budget_bytes=budget,
        cpu_budget_bytes=UNLIMITED,
        slices=slices,
        clip=clip,
        **freedom,
    ).plan()
    program = compile_program(plan, chain)
    verify(program, chain, gpu_budget_bytes=budget)
    assert plan.gpu_peak_bytes == gpu_peak_bytes(program, chain) <= budget
    assert plan.cpu_peak_bytes == cpu_peak_bytes(plan, chain)
    assert plan.step_s == predicted_step_s(program, chain, hardware)
    assert plan.bound_s <= plan.step_s * (1 + 1e-6)
    assert cpu_updates or not plan.cpu_updated()
    setting = Setting(
        chain=chain,
        hardware=hardware,
        slices=slices,
        clip=clip,
        budgets=Budgets(gpu_bytes=budget, cpu_bytes=UNLIMITED, **freedom),
    )

    def program_of(candidate: Candidate) -> Program:
        return compile_program(assemble(chain, candidate, slices=slices, clip=clip), chain)

    for candidate in candidates(setting, lambda candidate: gpu_peak_bytes(program_of(candidate), chain) <= budget):
        assert plan.step_s <= predicted_step_s(program_of(candidate), chain, hardware)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    host=st.sampled_from((2000, 6000, UNLIMITED)),
    small=st.sampled_from((0, 400, 1500, UNLIMITED)),
    slices=st.sampled_from((1, 2, 4)),
    clip=st.booleans(),
)
def test_the_least_possible_budget_is_enough_and_one_byte_less_is_refused(
    chain: Chain, hardware: Hardware, host: int, small: int, slices: int, clip: bool
) -> None:
    problem = {"cpu_budget_bytes": host, "slices": slices, "clip": clip}
    hardware = replace(hardware, min_transfer_bytes=small)
    try:
        least = Problem(chain=chain, hardware=hardware, gpu_budget_bytes=0, **problem).least().gpu_bytes
    except UserError as error:
        assert error.code == "host-memory-too-small"
        return
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
    with pytest.raises(UserError) as refused:
        Problem(chain=chain, hardware=hardware, gpu_budget_bytes=least - 1, **problem).plan()
    assert refused.value.code == "budget-too-small"


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chain=chains(),
    hardware=machines(),
    host=st.sampled_from((2000, 6000, UNLIMITED)),
    small=st.sampled_from((400, 1500, UNLIMITED)),
    slices=st.sampled_from((1, 2, 4)),
    clip=st.booleans(),
)
def test_that_small_tensors_stay_makes_no_budget_too_small(
    chain: Chain, hardware: Hardware, host: int, small: int, slices: int, clip: bool
) -> None:
    budgets = Budgets(gpu_bytes=0, cpu_bytes=host)
    problem = {"chain": chain, "budgets": budgets, "slices": slices, "clip": clip}
    steps = [Setting(hardware=replace(hardware, min_transfer_bytes=least), **problem) for least in (small, 0)]
    found = {
        device_bytes(candidate, s)
        for step in steps
        for s in in_rounds(step)
        if (candidate := frugal(s, lambda d, s=s: device_bytes(d, s), lambda d, s=s: host_bytes(d, s)))
    }
    for enough in found:
        assert least_gpu_bytes(steps[0]) <= enough
        fits = replace(steps[0], budgets=replace(budgets, gpu_bytes=enough))
        assert rounds_that_fit(fits)
        assert all(device_bytes(candidate, s) <= enough for s, candidate in rounds_that_fit(fits).items())


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), hardware=machines(), share=st.floats(0.0, 1.0), slices=st.sampled_from((1, 3)))
def test_a_small_host_is_never_overfilled(chain: Chain, hardware: Hardware, share: float, slices: int) -> None:
    everything = sum(t.bytes + t.state_bytes + t.gradient_bytes for t in chain.tensors())
    host = int(share * everything)
    try:
        plan = Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=UNLIMITED,
            cpu_budget_bytes=host,
            slices=slices,
            clip=False,
        ).plan()
    except UserError as error:
        assert error.code == "host-memory-too-small"
        assert all(not any(not o.offloaded_bytes for o in b.options) for b in chain.blocks)
    else:
        assert plan.cpu_peak_bytes <= host

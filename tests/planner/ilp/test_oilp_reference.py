"""The aggregated program against the printed one, which has a column per block and stage."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.candidate.setting import Budgets, Setting
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.search.problem import Problem
from tests.support.llama import GB, RTX_3060, llama
from tests.support.printed_oilp import printed_step
from tests.support.random_chains import chains, machines
from tests.support.stage_barriers import stage_barriers

UNLIMITED = 10**9


@pytest.mark.sweep(4)
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("share", [0.05, 0.5, 2.0])
def test_on_a_regular_chain_summing_over_blocks_loses_next_to_nothing(clip: bool, barrier: bool, share: float) -> None:
    chain = llama(6)
    least = (
        Problem(
            chain=chain,
            hardware=RTX_3060,
            gpu_budget_bytes=0,
            cpu_budget_bytes=100 * GB,
            slices=1,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    budgets = Budgets(gpu_bytes=int(least * (1 + share)), cpu_bytes=100 * GB)
    instance = make_instance(Setting(chain=chain, hardware=RTX_3060, budgets=budgets, slices=1, clip=clip))
    solution = solve_oilp(instance, gap=1e-5, more=stage_barriers if barrier else None)
    assert solution is not None
    printed = printed_step(instance, barrier=barrier)
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
def test_on_irregular_chains_it_agrees_with_the_printed_program(
    chain: Chain, hardware: Hardware, slices: int, clip: bool, barrier: bool, share: float
) -> None:
    least = (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=0,
            cpu_budget_bytes=UNLIMITED,
            slices=slices,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    budgets = Budgets(gpu_bytes=int(least * (1 + share)), cpu_bytes=UNLIMITED)
    instance = make_instance(Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip))
    solution = solve_oilp(instance, gap=1e-6, more=stage_barriers if barrier else None)
    printed = printed_step(instance, barrier=barrier)
    if printed is None:
        assert solution is None
    else:
        assert solution is not None
        assert 0.99 * printed <= solution.step_s + 1e-9  # 0.003% below was seen in thousands
        assert solution.step_s <= printed * (1 + 1e-5) + 1e-9


def uneven(seed: int) -> tuple[Chain, Hardware]:
    """A chain of trainable layers, each of another size and speed, and a machine with a slow CPU or slow links."""
    draw = random.Random(seed)

    def block(name: str) -> Block:
        elements, saved, seconds = draw.randint(1, 500), draw.randint(0, 2000), draw.uniform(0, 3)
        tensor = Tensor(
            name=f"{name}.w",
            elements=elements,
            bytes=4 * elements,
            gradient_bytes=4 * elements,
            state_bytes=8 * elements,
        )
        keep = Option(
            name="keep",
            saved_bytes=0 if name in ("first", "last") else saved,
            forward_s=seconds,
            backward_s=draw.uniform(0, 3),
            forward_peak_bytes=saved,
            backward_peak_bytes=saved,
        )
        return Block(name=name, kind=name, tensors=(tensor,), options=(keep,), input_bytes=50, output_bytes=50)

    names = ["first", *(f"layer{i}" for i in range(draw.randint(2, 5))), "last"]
    machine = Hardware(
        name="uneven",
        gpu_bytes=10**6,
        cpu_bytes=10**7,
        h2d_bytes_per_s=draw.choice((500.0, 1000.0, 5000.0)),
        d2h_bytes_per_s=draw.choice((500.0, 1000.0, 5000.0)),
        gpu_update_parameters_per_s=200.0,
        cpu_update_parameters_per_s=draw.choice((200.0, 1000.0)),
        cpu_memory_bytes_per_s=1e6,
    )
    return Chain(blocks=tuple(block(name) for name in names)), machine


@pytest.mark.parametrize("seed", (6, 38, 44, 63))
def test_with_barriers_a_byte_goes_through_one_queue_after_the_other(seed: int) -> None:
    # Sums alone let these updates begin with gradients of other blocks: 0.4 to 2% too fast here, up to 13% elsewhere.
    chain, hardware = uneven(seed)
    least = (
        Problem(
            chain=chain,
            hardware=hardware,
            gpu_budget_bytes=0,
            cpu_budget_bytes=UNLIMITED,
            slices=1,
            clip=False,
        )
        .least()
        .gpu_bytes
    )
    budgets = Budgets(gpu_bytes=int(least * 1.2), cpu_bytes=UNLIMITED)
    instance = make_instance(Setting(chain=chain, hardware=hardware, budgets=budgets, slices=1, clip=False))
    solution = solve_oilp(instance, gap=1e-6, more=stage_barriers)
    printed = printed_step(instance, barrier=True)
    assert solution is not None and printed is not None
    assert abs(solution.step_s / printed - 1) < 1e-4

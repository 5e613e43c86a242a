"""Block 0 updated by the CPU: its forward follows its backward at once, and waits for gradient, update and weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.candidate.setting import Budgets, Setting
from planner.graph import Pair
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.machine.hardware import Hardware
from planner.schedule.chain import Block, Chain, Option, Tensor
from planner.schedule.compile import compile_program
from planner.schedule.items import Item
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.problem import Problem
from tests.support import chains as small
from tests.support import engine_plans as plans
from tests.support.plain_engine import PlainEngine
from tests.support.stage_barriers import stage_barriers
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("barrier", [False, True])
def test_sending_updating_and_fetching_it_take_their_time_one_after_another(barrier: bool, clip: bool) -> None:
    # Weight and gradient fit, states do not: the CPU has to. Three stages of a second, then a second for each of the
    # three: 100 bytes down at 100 a second, 25 parameters at 25 a second, 100 bytes up.
    second = Option(name="keep", forward_s=1, backward_s=1, reads_input=False)
    weight = Tensor(name="e", elements=25, bytes=100, gradient_bytes=100, state_bytes=200)
    chain = Chain(
        blocks=(
            Block(name="embedding", kind="e", tensors=(weight,), options=(second,)),
            Block(name="head", kind="h", tensors=(), options=(replace(second, backward_s=0),)),
        )
    )
    machine = Hardware(
        name="hand",
        gpu_bytes=10**6,
        cpu_bytes=10**6,
        h2d_bytes_per_s=100,
        d2h_bytes_per_s=100,
        gpu_update_parameters_per_s=25,
        cpu_update_parameters_per_s=25,
        cpu_memory_bytes_per_s=10**6,
    )

    def step_s(cpu_updates: bool) -> float | None:
        budgets = Budgets(gpu_bytes=212, cpu_bytes=10**6, cpu_updates=cpu_updates)
        instance = make_instance(Setting(chain=chain, hardware=machine, budgets=budgets, slices=1, clip=clip))
        solution = solve_oilp(instance, gap=0, more=stage_barriers if barrier else None)
        return None if solution is None else solution.step_s

    assert step_s(cpu_updates=True) == pytest.approx(3 + 3, rel=0.02)  # some bytes of losses and norms to spare
    assert step_s(cpu_updates=False) is None


def test_the_planner_takes_it_where_that_is_faster_than_its_states_on_the_way() -> None:
    machine = replace(small.HARDWARE, cpu_update_parameters_per_s=10000.0, h2d_bytes_per_s=200.0, d2h_bytes_per_s=200.0)
    chain, given = small.chain(2), {"cpu_budget_bytes": 10**9, "slices": 1, "clip": False}
    budget = Problem(chain=chain, hardware=machine, gpu_budget_bytes=0, **given).least().gpu_bytes + 1
    plan = Problem(chain=chain, hardware=machine, gpu_budget_bytes=budget, **given).plan()
    assert "e" in plan.cpu_updated()
    assert "w:e" in plan.stages[0].prefetch and "g:e" in plan.stages[-1].offload
    program = compile_program(plan, chain)
    verify(program, chain, gpu_budget_bytes=budget)
    assert gpu_peak_bytes(program, chain) == plan.gpu_peak_bytes
    assert plan.bound_s <= plan.step_s * (1 + 1e-6)
    assert plan.step_s >= plan.lp_step_s * (1 - plan.solver_gap) - 1e-9


@pytest.mark.parametrize("clip", [False, True])
def test_its_states_are_not_part_of_the_least_possible_budget(clip: bool) -> None:
    chain = small.chain()
    weight = small.tensor("e", 10**6)
    chain = replace(chain, blocks=(replace(chain.blocks[0], tensors=(weight,)), *chain.blocks[1:]))
    machine = replace(small.HARDWARE, cpu_bytes=10**9)
    least = (
        Problem(
            chain=chain,
            hardware=machine,
            gpu_budget_bytes=0,
            cpu_budget_bytes=10**9,
            slices=1,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    assert weight.bytes + weight.gradient_bytes < least < weight.bytes + weight.gradient_bytes + weight.state_bytes
    plan = Problem(
        chain=chain,
        hardware=machine,
        gpu_budget_bytes=least,
        cpu_budget_bytes=10**9,
        slices=1,
        clip=clip,
    ).plan()
    assert plan.gpu_peak_bytes <= least


def embedding_on_the_cpu(chain: Chain, *, slices: int, clip: bool) -> Plan:
    """Block 0's weight leaves after both of its uses and the CPU updates it; the rest stays on the device."""
    plan = plans.resident_plan(chain, slices=slices, clip=clip)
    names = [t.name for t in chain.blocks[0].tensors]
    weights, gradients = [*map(Item.weight, names)], [*map(Item.gradient, names)]
    lines: dict[str, dict[str, list[str]]] = {}
    for stage in plan.stages:
        kept = [n for n in stage.gpu_update if n not in names]
        lines[stage.name] = {"gpu_update": kept, "evict": [*map(Item.gradient, kept)]}
    plans.add(lines["F0"], prefetch=weights)
    plans.add(lines["B0"], offload=gradients, evict=[*gradients, *weights], cpu_update=names)
    resident = [item for item in plan.resident if item.name not in names]
    return plans.make_plan(chain, lines, options=plan.options, resident=resident, slices=slices, rounds=1, clip=clip)


CODES: dict[object, Pair] = {}  # generated code is shared by kind and shapes


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("slices", "clip"), [(1, None), (2, 0.1), (2, None)])
def test_training_is_plain_pytorchs_bit_for_bit(slices: int, clip: float | None) -> None:
    plain_model, model = make_model("llama", torch.float32), make_model("llama", torch.float32)
    chain = plans.chain_of(model)
    plan = embedding_on_the_cpu(chain, slices=slices, clip=clip is not None)
    engine = Engine(model, plan=plan, chain=chain, device=CPU, optimizer=plans.adamw(model), max_grad_norm=clip)
    engine._rounds.codes = CODES
    plain = PlainEngine(plain_model, optimizer=plans.adamw(plain_model), max_grad_norm=clip)
    try:
        for step in range(3):
            batches = [batch_of(100 * step + k) for k in range(slices)]
            count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
            given = {
                "seeds": [10 * step + k for k in range(slices)],
                "num_items_in_batch": count,
                "learning_rate": 1e-3,
            }
            mine, theirs = engine.step(batches, **given), plain.step(batches, **given)
            assert all(torch.equal(a, b) for a, b in zip(mine.losses, theirs.losses, strict=True))
        expected = {name: {k: t.clone() for k, t in parts.items()} for name, parts in plain.state()}
        for name, parts in engine.state():
            assert all(torch.equal(tensor, expected[name][k]) for k, tensor in parts.items()), name
    finally:
        engine.close()

"""The planner's choice of rounds: as few as fit, more where that is faster; and the numbers stay plain PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.candidate.evaluate import predicted_step_s
from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.ilp.instance import make_instance
from planner.ilp.lower_bound import lower_bound_s
from planner.ilp.program import solve_oilp
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from planner.schedule.verify import verify
from planner.search.make_plan import in_rounds
from planner.search.problem import Problem
from tests.support.chains import HARDWARE, chain
from tests.support.engine_plans import adamw, chain_of
from tests.support.llama import GB, RTX_3060
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
HOST = 10**9
SLICES = 8


def wide(layers: int = 3) -> Chain:
    """A chain whose slices hold much between two blocks."""
    plain = chain(layers)
    blocks = [replace(b, forward_held_bytes=2000, backward_held_bytes=2000, input_bytes=2000) for b in plain.blocks]
    return replace(plain, blocks=tuple(blocks), slice_tokens=10)


def step_of(budget: int) -> Setting:
    budgets = Budgets(gpu_bytes=budget, cpu_bytes=HOST)
    return Setting(chain=wide(), hardware=HARDWARE, budgets=budgets, slices=SLICES, clip=False)


def planned(budget: int, *, clip: bool) -> Plan:
    return Problem(
        chain=wide(),
        hardware=HARDWARE,
        gpu_budget_bytes=budget,
        cpu_budget_bytes=HOST,
        slices=SLICES,
        clip=clip,
    ).plan()


def test_a_steps_slices_are_cut_into_all_equal_rounds():
    ways = [(s.rounds, s.slices) for s in in_rounds(replace(step_of(0), slices=12))]
    assert ways == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]


@pytest.mark.parametrize("clip", [False, True])
def test_where_one_round_does_not_fit_the_step_has_several(clip):
    one = (
        Problem(
            chain=wide(),
            hardware=HARDWARE,
            gpu_budget_bytes=0,
            cpu_budget_bytes=HOST,
            slices=1,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    all_at_once = (
        Problem(
            chain=wide(),
            hardware=HARDWARE,
            gpu_budget_bytes=0,
            cpu_budget_bytes=HOST,
            slices=SLICES,
            clip=clip,
        )
        .least()
        .gpu_bytes
    )
    assert all_at_once < one + 4000  # gradients, not eight slices
    plan = planned(all_at_once, clip=clip)
    assert (plan.rounds, plan.slices) == (8, 1)
    verify(compile_program(plan, wide()), wide(), gpu_budget_bytes=all_at_once)
    with pytest.raises(UserError, match="least possible"):
        planned(all_at_once - 1, clip=clip)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("budget", [12_000, 20_000, 30_000, 60_000])
def test_the_rounds_chosen_are_right_within_the_budget_and_not_slower_than_one(budget):
    plan = planned(budget, clip=False)
    program = compile_program(plan, wide())
    verify(program, wide(), gpu_budget_bytes=budget)
    assert plan.rounds * plan.slices == SLICES
    assert plan.gpu_peak_bytes == gpu_peak_bytes(program, wide()) <= budget
    assert plan.step_s == predicted_step_s(program, wide(), HARDWARE)
    assert plan.bound_s <= plan.step_s
    fetched = [op.round for op in program.ops if op.kind is OpKind.FETCH and op.subject[0] == "w"]
    assert all(fetched.count(number) == fetched.count(0) for number in range(plan.rounds))


def test_with_room_for_all_slices_there_is_one_round():
    assert planned(10**7, clip=False).rounds == 1


def test_the_bound_holds_for_each_number_of_rounds():
    plan = planned(25_000, clip=False)
    for setting in in_rounds(step_of(25_000)):
        bound_s = lower_bound_s(setting)
        assert plan.bound_s <= bound_s
        if plan.rounds == setting.rounds:
            assert bound_s <= plan.step_s


@pytest.mark.parametrize("budget", [25_000, 30_000])
def test_the_solvers_gap_is_to_the_best_number_of_rounds(budget):
    plan = planned(budget, clip=False)
    for setting in in_rounds(step_of(budget)):
        p = make_instance(setting)
        solution = solve_oilp(p, gap=1e-4)
        if solution is not None:
            assert plan.lp_step_s * (1 - plan.solver_gap) <= solution.step_s * (1 + 1e-6)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "clip"), [("llama", None), ("gpt2", 0.5)])
def test_a_budget_below_that_of_one_round_gives_the_numbers_of_plain_accumulation(name, clip):
    plain, model = make_model(name), make_model(name)
    a_chain = chain_of(model)
    problem = {"cpu_budget_bytes": HOST, "clip": clip is not None}
    budget = Problem(chain=a_chain, hardware=HARDWARE, gpu_budget_bytes=0, slices=4, **problem).least().gpu_bytes
    plan = Problem(
        chain=a_chain,
        hardware=HARDWARE,
        gpu_budget_bytes=budget,
        slices=4,
        **problem,
    ).plan()
    assert plan.rounds > 1
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    engine = Engine(model, plan=plan, chain=a_chain, device=torch.device("cpu"), metered=True, **settings)
    reference = PlainEngine(plain, **settings)
    try:
        for step in range(3):
            batches = [batch_of(100 * step + k, length=16) for k in range(4)]
            count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
            rest = {"seeds": [10 * step + k for k in range(4)], "learning_rate": 1e-3, "num_items_in_batch": count}
            got, expected = engine.step(batches, **rest), reference.step(batches, **rest)
            assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
            assert got.grad_norm is None or torch.equal(got.grad_norm, expected.grad_norm)
            assert got.peak_bytes <= plan.gpu_peak_bytes <= budget
        wanted = dict(reference.state())
        for weight, parts in engine.state():
            assert all(torch.equal(t, wanted[weight][key]) for key, t in parts.items()), weight
    finally:
        engine.close()


def test_workspaces_of_the_slices_threads_are_counted_before_there_are_places() -> None:
    """Slices that go through a block together have a thread and a workspace each, as 33 MiB on an H100: in a budget
    with too little room for them the plan has more rounds, and not the most frugal schedule."""
    workspace, slices = 32 * 2**20, 2
    chain = chain_of(make_model("llama", torch.float32), arranged=True)
    chain = replace(chain, frame_bytes=chain.frame_bytes + workspace, thread_bytes=workspace)
    slow = replace(RTX_3060, h2d_bytes_per_s=1e5, d2h_bytes_per_s=1e5)  # layers take a second
    plans = [
        Problem(
            chain=chain,
            hardware=slow,
            gpu_budget_bytes=budget_bytes,
            cpu_budget_bytes=GB,
            slices=slices,
            clip=False,
        ).plan()
        for budget_bytes in (16 * workspace, (slices + 1) * workspace)
    ]
    assert plans[1].rounds == slices
    assert plans[1].step_s <= 1.02 * plans[0].step_s
    assert plans[1].gpu_peak_bytes <= plans[1].gpu_budget_bytes

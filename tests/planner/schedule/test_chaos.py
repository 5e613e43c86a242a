"""Any order that queues and waits allow computes the same; with any wait taken away some order does not. Some tests
take seconds: they solve the integer program of a model, or many small ones."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from planner.graph import Pair
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue, compile_program
from planner.schedule.forward_program import ForwardBytes, forward_program
from planner.schedule.plan import Plan
from planner.schedule.verify import InvalidProgram, verify
from planner.search.problem import Problem
from tests.support import chains as small
from tests.support.chaos import Chaos, Wait, waits
from tests.support.chaos_engine import ChaosInterpreter, Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.plain_engine import PlainEngine
from tests.support.random_plans import random_chain, random_plan
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.runtime.cpu import CpuMachine
from worker.runtime.interpreter import Performer

torch.set_num_threads(1)
CPU = torch.device("cpu")
ORDERS = 1000
HOST_BYTES = 10**9


def solved(
    share: float, *, layers: int = 4, tied: bool = False, on_disk: bool = False, **problem: object
) -> tuple[Plan, Chain]:
    """The planner's own, for a budget between the least possible (0) and what needs no planning (1)."""
    chain = small.chain(layers, tied=tied)
    if on_disk:
        chain = small.frozen_on_disk(chain)
    problem = {"slices": 1, "clip": False, **problem}
    low = (
        Problem(
            chain=chain,
            hardware=small.HARDWARE,
            gpu_budget_bytes=0,
            cpu_budget_bytes=HOST_BYTES,
            **problem,
        )
        .least()
        .gpu_bytes
    )
    high = 12 * sum(t.elements for t in chain.tensors()) + 1500 * layers * problem["slices"]
    budget = low + int(share * max(0, high - low))
    plan = Problem(
        chain=chain,
        hardware=small.HARDWARE,
        gpu_budget_bytes=budget,
        cpu_budget_bytes=HOST_BYTES,
        **problem,
    ).plan()
    return plan, chain


def drawn(seed: int) -> tuple[Plan, Chain]:
    chance = random.Random(seed)
    chain = random_chain(chance)
    return random_plan(chain, chance), chain


PLANS = {
    "mixed": lambda: (small.mixed_plan(), small.chain()),
    "mixed, 3 slices": lambda: (small.mixed_plan(3), small.chain()),
    "all offloaded": lambda: (small.mixed_plan(2, options="keep offload offload keep"), small.chain()),
    "mixed, 3 rounds": lambda: (small.rounds_plan(3, 1), small.chain()),
    "mixed, 2 rounds of 2 slices": lambda: (small.rounds_plan(2, 2), small.chain()),
    "all offloaded, 2 rounds of 2": lambda: (small.rounds_plan(options="keep offload offload keep"), small.chain()),
    "planned, least": lambda: solved(0.0),
    "planned, some": lambda: solved(0.2, slices=2),
    "planned, more": lambda: solved(0.5, slices=3),
    "planned, clipped": lambda: solved(0.2, clip=True),
    "planned, clipped, 2 slices": lambda: solved(0.4, clip=True, slices=2),
    "planned, tied": lambda: solved(0.2, tied=True, slices=2),
    "planned, from disk": lambda: solved(0.0, on_disk=True, slices=2),
    "planned, some from disk, clipped": lambda: solved(0.2, on_disk=True, clip=True, layers=6),
    "planned, no CPU updates": lambda: solved(0.1, cpu_updates=False),
    **{f"random {seed}": functools.partial(drawn, seed) for seed in range(10)},
}


def evaluated(slices: int, budget_bytes: int) -> tuple[Program, Chain]:
    """The mixed plan's program of evaluation."""
    measured = ForwardBytes(start=20, held=(10, 50, 50, 50, 4), peak=(60, 300, 300, 100))
    chain = small.chain()
    program = forward_program(small.mixed_plan(), chain, measured, slices=slices, budget_bytes=budget_bytes)
    return program, chain


FORWARD = {
    "evaluation, least": lambda: evaluated(1, 5110),
    "evaluation, 3 slices": lambda: evaluated(3, 5600),
    "evaluation, all at once": lambda: evaluated(2, 10**6),
}


@functools.cache
def compiled(name: str) -> tuple[Program, Chain]:
    if name in FORWARD:
        return FORWARD[name]()
    plan, chain = PLANS[name]()
    return compile_program(plan, chain), chain


@pytest.fixture(params=[*PLANS, *FORWARD])
def program_and_chain(request: pytest.FixtureRequest) -> tuple[Program, Chain]:
    return compiled(request.param)


@pytest.mark.sweep(8)
def test_a_thousand_random_orders_and_the_worst_ones_compute_the_same(
    program_and_chain: tuple[Program, Chain],
) -> None:
    chaos = Chaos(*program_and_chain)
    expected = chaos.serial()
    assert (chaos.random(ORDERS, seed=1) == expected).all()
    assert (chaos.steered(seed=2) == expected).all()


@pytest.mark.sweep(4)
def test_no_program_without_one_of_its_waits_is_verified(program_and_chain: tuple[Program, Chain]) -> None:
    program, chain = program_and_chain
    for wait in waits(program):
        with pytest.raises(InvalidProgram, match="nothing orders them"):
            verify(without(program, wait), chain)


@pytest.mark.sweep(4)
def test_without_a_wait_some_order_computes_something_else_but_where_nobody_reads_what_is_fetched(
    program_and_chain: tuple[Program, Chain],
) -> None:
    program, chain = program_and_chain
    chaos, removed = Chaos(program, chain), waits(program)
    if removed:
        differs = (chaos.without(removed, seed=3) != chaos.serial()).any((1, 2))
        unseen = [wait for wait, seen in zip(removed, differs, strict=True) if not seen]
        assert [str(program.ops[w.op]) for w in unseen if not (chaos.is_idle(w.op) or chaos.is_idle(w.on))] == []


def without(program: Program, wait: Wait) -> Program:
    op, on = program.ops[wait.op], program.ops[wait.on].name
    damaged = replace(op, waits=tuple(name for name in op.waits if name != on))
    return replace(program, ops=(*program.ops[: wait.op], damaged, *program.ops[wait.op + 1 :]))


def test_the_plans_do_everything_and_most_of_them_have_much_to_wait_for() -> None:
    programs = [compiled(name)[0] for name in PLANS]
    assert sum(len(waits(program)) >= 20 for program in programs) >= 20
    did = {(op.kind, op.subject[0], op.carried, program.clip) for program in programs for op in program.ops if op.waits}
    for clip in (False, True):
        assert {(OpKind.FETCH, item, False, clip) for item in "wa"} < did
        assert {(OpKind.SEND, item, False, clip) for item in "wgsa"} < did
        assert any(kind is OpKind.CPU_UPDATE and clipped == clip for kind, _, _, clipped in did)
    assert any(carried for _, _, carried, _ in did)
    assert {kind for kind, *_ in did} >= {OpKind.CPU_AHEAD, OpKind.UPDATE, OpKind.RUN, OpKind.FREE}
    assert {program.slices for program in programs} >= {1, 2, 3} <= {program.rounds for program in programs}


@dataclass(frozen=True)
class Case:
    """A model under a plan with all options, both sides of updates, one of them carried where nothing is clipped."""

    name: str
    slices: int
    clip: float | None
    dtype: torch.dtype
    rounds: int = 1
    ahead: bool = False


CASES = (
    Case("llama", 1, None, torch.float32),
    Case("llama", 2, 0.5, torch.bfloat16),
    Case("gpt2", 2, None, torch.bfloat16),
    Case("gpt2", 3, 0.5, torch.float32),
    Case("llama", 1, 0.5, torch.float32, rounds=2),
    Case("llama", 1, 0.5, torch.bfloat16, ahead=True),
)
DRAWN = 18
MOODS = [
    *(Mood.drawn(seed) for seed in range(DRAWN)),
    Mood(seed=0, eager=dict.fromkeys(Queue, 0.0)),
    Mood(seed=0, eager=dict.fromkeys(Queue, 1.0)),
    *(Mood(seed=0, eager={q: float(q is not late) for q in Queue}) for late in (Queue.H2D, Queue.D2H, Queue.CPU)),
    *(Mood(seed=0, eager={q: float(q is early) for q in Queue}) for early in (Queue.H2D, Queue.D2H, Queue.CPU)),
]
PAIRS: dict[object, Pair] = {}


def train(engine: Engine | PlainEngine, case: Case) -> Iterator[torch.Tensor]:
    """Losses of three steps, the third one after a drain, then the state."""
    for step in range(3):
        seeds = [10 * step + k for k in range(case.slices * case.rounds)]
        result = engine.step([batch_of(seed) for seed in seeds], seeds=seeds, learning_rate=1e-2)
        yield torch.stack([loss.detach() for loss in result.losses])
        if step == 1:
            engine.drain()
    for _, parts in engine.state():
        yield from (parts[part].clone() for part in sorted(parts))


@functools.cache
def chain_for(case: Case) -> Chain:
    return chain_of(make_model(case.name, case.dtype))


def plan_for(case: Case) -> Plan:
    clip = case.clip is not None
    return mixed_plan(chain_for(case), slices=case.slices, rounds=case.rounds, clip=clip, ahead=case.ahead)


@functools.cache
def expected(case: Case) -> list[torch.Tensor]:
    model = make_model(case.name, case.dtype)
    return list(train(PlainEngine(model, optimizer=adamw(model), max_grad_norm=case.clip), case))


def trained(
    case: Case, mood: Mood, monkeypatch: pytest.MonkeyPatch, removed: Wait | None = None
) -> tuple[list[torch.Tensor], list[Op]]:
    """What the engine's training gives, and the operations in the order in which they ran."""
    made: list[ChaosInterpreter] = []

    def chaotic(machine: CpuMachine, program: Program, performer: Performer) -> ChaosInterpreter:
        made.append(ChaosInterpreter(program, performer, mood))
        return made[0]

    monkeypatch.setattr(CpuMachine, "interpreter", chaotic)
    if removed is not None:
        monkeypatch.setattr("worker.engine.engine.compile_program", lambda *of: without(compile_program(*of), removed))
    model, chain = make_model(case.name, case.dtype), chain_for(case)
    engine = Engine(
        model, plan=plan_for(case), chain=chain, optimizer=adamw(model), max_grad_norm=case.clip, device=CPU
    )
    engine._rounds.codes = PAIRS
    try:
        return list(train(engine, case)), made[0].log
    finally:
        engine.close()


def same(found: list[torch.Tensor], case: Case) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected(case), strict=True))


@pytest.mark.parametrize("number", range(len(MOODS)))
def test_the_engine_computes_what_plain_pytorch_does_in_any_order(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[number % len(CASES)]
    found, log = trained(case, MOODS[number], monkeypatch)
    assert same(found, case)
    assert set(Counter(op for op in log if op.queue is not Queue.COMPUTE).values()) == {3}


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: "clipped" if case.clip else "free")
def test_the_engine_computes_something_else_without_a_wait(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile_program(plan_for(case), chain_for(case))
    of_kind = {(program.ops[w.op].kind, program.ops[w.on].kind): w for w in reversed(waits(program))}  # the first
    kinds = {(op, on) for op, on in of_kind if on in (OpKind.FETCH, OpKind.SEND, OpKind.CPU_UPDATE)}
    assert len(kinds) >= 4
    for kind in kinds:
        late = program.ops[of_kind[kind].on].queue
        mood = Mood(seed=0, eager={queue: float(queue is not late) for queue in Queue})
        with monkeypatch.context() as patch, contextlib.suppress(KeyError):  # raised by a copy of what is released
            found, _ = trained(case, mood, patch, of_kind[kind])
            assert not same(found, case), kind


@pytest.mark.parametrize("seed", range(6))
def test_an_evaluation_gives_the_plain_models_losses_in_any_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chaotic(machine: CpuMachine, program: Program, performer: Performer) -> ChaosInterpreter:
        return ChaosInterpreter(program, performer, Mood.drawn(seed))

    monkeypatch.setattr(CpuMachine, "interpreter", chaotic)
    case, model = CASES[0], make_model("llama")
    engine = Engine(
        model, plan=plan_for(case), chain=chain_for(case), optimizer=adamw(model), max_grad_norm=None, device=CPU
    )
    batches, plain = [batch_of(k) for k in range(3)], make_model("llama").eval()
    try:
        losses = engine.evaluate(batches).losses
    finally:
        engine.close()
    with torch.no_grad():
        assert all(torch.equal(loss, plain(**batch).loss) for loss, batch in zip(losses, batches, strict=True))

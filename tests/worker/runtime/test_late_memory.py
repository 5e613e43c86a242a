"""A plan with places runs in the memory that it says, on the emulated device. Some tests take seconds: models are
traced and trained on an emulated device."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from planner.errors import UserError
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from tests.support.arena import arena_on, placed, placed_chain
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of, muon
from tests.support.engines import data, learning_rate
from tests.support.families import family_model
from tests.support.late_engines import CUDA, PLANS, Case, expected, train
from tests.support.late_waits import a_step
from tests.support.mutants.model import Model
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.runtime.arena import Arena, take_over

pytestmark = pytest.mark.emulated

CASES = [
    Case("llama", "mixed", slices=2, clip=0.5),
    Case("llama", "mixed", slices=2, rounds=2),
    Case("llama", "ahead", torch.bfloat16, slices=2, clip=0.5),
    Case("llama", "streaming", slices=2),
    Case("gpt2", "mixed", slices=3),
    Case("llama", "mixed", torch.bfloat16, clip=0.5, rounded=True),
    Case("llama", "mixed", torch.bfloat16, clip=0.5, muon=True),
    Case("llama", "mixed", torch.bfloat16, slices=2),
    Case("llama", "offload-all", slices=2),
    Case("llama", "recompute", slices=2),
    Case("gpt2", "keep", slices=2, rounded=True),
    Case("gpt2", "keep", slices=2, muon=True),
]


@pytest.fixture(autouse=True)
def _tiny_models_have_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.schedule.places.SMALL_BYTES", 2048)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # the device has no such library


class LooksAtData(nn.Module):
    """A layer that cannot be traced: which rows it computes on is for the data to say."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((16, 16), (16, 64), (64, 16)))

    def forward(self, x: Tensor) -> Tensor:
        flat, y = x.flatten(0, 1), torch.tanh(self.core(x)).flatten(0, 1)
        rows = (y.sum(-1) > 0).nonzero().squeeze(-1)
        return flat.index_add(0, rows, self.down(torch.relu(self.up(y[rows])))).view(x.shape)


def plan_of(case: Case) -> Plan:
    chain = placed_chain(case.model, case.dtype, case.rounded, case.muon)
    rounds = {"rounds": case.rounds} if case.rounds > 1 else {}
    return placed(PLANS[case.plan](chain, slices=case.slices, clip=case.clip is not None, **rounds), chain)


def least_plan(chain: Chain, *, slices: int, clip: bool) -> Plan:
    """The planner's, at the least budget that it finds a plan for."""
    machine = replace(estimate_hardware(CUDA), min_transfer_bytes=0, cpu_bytes=2**30)
    asked = {"cpu_budget_bytes": 2**30, "slices": slices, "clip": clip}
    least = Problem(chain=chain, hardware=machine, gpu_budget_bytes=0, **asked).least().gpu_bytes
    plan = Problem(chain=chain, hardware=machine, gpu_budget_bytes=least, **asked).plan()
    assert plan.offsets
    return plan


@pytest.fixture
def engine_in(device: Device) -> Iterator[Callable[[Case, Plan], tuple[Engine, Arena]]]:
    """engine_in(case, plan): an engine whose memory is the arena's, which is the allocator until the test ends."""
    with arena_on(device) as arena:
        made: list[Engine] = []

        def make(case: Case, plan: Plan) -> tuple[Engine, Arena]:
            model = make_model(case.model, case.dtype)
            chain = placed_chain(case.model, case.dtype, case.rounded, case.muon)
            optimizer = (muon if case.muon else adamw)(model)
            made.append(
                Engine(model, plan=plan, chain=chain, optimizer=optimizer, max_grad_norm=case.clip, device=CUDA)
            )
            return made[-1], arena

        yield make
        for engine in made:
            engine.close()


class Calm:
    """The driver is not called from now on, and what there is from it is the plan's."""

    def __init__(self, device: Device, arena: Arena, plan: Plan) -> None:
        self._device, self._arena, self._plan = device, arena, plan
        self._calls = device.driver.mallocs, device.driver.frees

    def check(self) -> None:
        counts = self._arena.counts()
        assert counts.most_reserved <= self._plan.gpu_peak_bytes <= self._plan.gpu_budget_bytes
        assert counts.strays == 0
        assert (self._device.driver.mallocs, self._device.driver.frees) == self._calls


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_runs_in_the_memory_of_its_places_and_takes_no_other(
    device: Device, case: Case, request: pytest.FixtureRequest
) -> None:
    wanted, plan = expected(case, 4), plan_of(case)
    engine, arena = request.getfixturevalue("engine_in")(case, plan)
    device.queues.set_mood(Mood.drawn(3))
    found = []
    for step, tensor in enumerate(train(engine, case, 4)):
        found.append(tensor)
        if step == 0:
            calm = Calm(device, arena, plan)
    calm.check()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def of_lengths(step: int, lengths: tuple[int, ...]) -> tuple[list[dict[str, Tensor]], dict[str, object]]:
    """A step's data, a slice of each of these lengths."""
    batches = [batch_of(10 * step + k, length=length) for k, length in enumerate(lengths)]
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    return batches, {"seeds": [1000 * step + k for k in range(len(lengths))], "num_items_in_batch": count}


LENGTHS = [(64, 64), (16, 64), (64, 32), (16, 16), (64, 64), (32, 64)]
KNOWN = 4  # slices from this step on are as there have been before


def windowed(dtype: torch.dtype) -> nn.Module:
    """Beyond 24 tokens it has a mask."""
    return family_model("mistral", dtype, sliding_window=24, hidden_size=128, attention_dropout=0.0)


MIXED = {
    "llama-least": (functools.partial(make_model, "llama", width=128, dropout=0.0), torch.float32),
    "window": (windowed, torch.bfloat16),
}


@pytest.mark.parametrize("name", MIXED)
def test_slices_of_all_lengths_run_in_the_memory_of_the_longest_ones(
    device: Device, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.schedule.places.SMALL_BYTES", 8192)
    monkeypatch.setattr("planner.schedule.places.PAGE_BYTES", 2**16)
    make, dtype = MIXED[name]
    chain = chain_of(make(dtype=dtype), batch_of(length=64), device=CUDA, arranged=True)
    if name == "llama-least":
        plan = least_plan(chain, slices=2, clip=True)
    else:
        plan = PLANS["mixed"](chain, slices=2, clip=True)
        sets = (plan.options[0], "keep-1", "offload-1", "offload-all-1", plan.options[-1])  # of a front
        plan = placed(replace(plan, options=sets), chain)
    model, plain_model = make(dtype=dtype), make(dtype=dtype).to(CUDA)
    settings = {"optimizer": adamw(model), "max_grad_norm": 0.5, "device": CUDA}
    plain, wanted = PlainEngine(plain_model, **settings), []
    for step, lengths in enumerate(LENGTHS):
        batches, rest = of_lengths(step, lengths)
        wanted.append(torch.stack(plain.step(batches, learning_rate=learning_rate(step), **rest).losses).cpu())
    with arena_on(device) as arena:
        engine = Engine(model, plan=plan, chain=chain, **settings)
        device.queues.set_mood(Mood.drawn(5))
        try:
            for step, lengths in enumerate(LENGTHS):
                batches, rest = of_lengths(step, lengths)
                with a_step(device, first=step < KNOWN):
                    result = engine.step(batches, learning_rate=learning_rate(step), **rest)
                assert torch.equal(torch.stack(result.losses).cpu(), wanted[step]), step
                if step == 0:
                    calm = Calm(device, arena, plan)
                if step % 2:
                    engine.evaluate([batch_of(step, length=length) for length in (16, 8)])
                    saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state()]
                    engine.load_state(saved, step=engine.steps_done)
            calm.check()
        finally:
            engine.close()


def test_evaluations_texts_checkpoints_and_errors_between_steps_need_no_more(
    device: Device, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    case = Case("llama", "mixed", slices=2, clip=0.5)
    plan = plan_of(case)
    wanted = expected(case, 4)
    engine, arena = request.getfixturevalue("engine_in")(case, plan)
    device.queues.set_mood(Mood.drawn(6))
    batches = [batch_of(k, length=8, padded=k == 1) for k in range(3)]
    found, said = [], []
    for step, tensor in enumerate(train(engine, case, 4)):
        found.append(tensor)
        if step == 0:
            calm = Calm(device, arena, plan)
        if step >= 3:
            continue
        said.append([float(loss) for loss in engine.evaluate(batches).losses])
        said.append(engine.generate([[5, 6, 7], [9]], new_tokens=3, pad=2))
        saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state()]
        engine.load_state(saved, step=engine.steps_done)
        with pytest.raises(ValueError, match="made to fail"), monkeypatch.context() as patch:
            patch.setattr("worker.engine.block_calls.Call.forward", _fail)
            given, rest = data(step + 1, 2)
            engine.step(given, learning_rate=1.0, **rest)
    calm.check()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _fail(*_: object) -> None:
    raise ValueError("made to fail")


def test_an_engine_that_could_not_be_made_keeps_no_memory_for_itself(
    device: Device, request: pytest.FixtureRequest
) -> None:
    plan, make = plan_of(CASES[0]), request.getfixturevalue("engine_in")
    device.host_bytes = device.host.bytes + 4096
    with pytest.raises(UserError, match="host-memory-not-registered"):
        make(CASES[0], plan)
    gc.collect()
    device.reap()
    arena = take_over()
    assert arena is not None and arena.counts().mallocs and arena.counts().reserved == 0


def without_memory(engine: Engine, case: Case) -> None:
    """A step whose slices are too long for the plan."""
    batches, rest = data(1, case.batches)
    engine.step([{name: t.repeat(1, 300) for name, t in b.items()} for b in batches], learning_rate=1.0, **rest)


@pytest.mark.parametrize("end", [Engine.close, Engine.restore])
@pytest.mark.parametrize("slices", [1, 2])
def test_an_engine_that_has_ended_leaves_its_memory_to_the_next_one_whoever_holds_it(
    device: Device, slices: int, end: Callable[[Engine], object], request: pytest.FixtureRequest
) -> None:
    case = Case("llama", "mixed", slices=slices, clip=0.5)
    wanted, plan = expected(case), plan_of(case)
    make = request.getfixturevalue("engine_in")
    first, arena = make(case, plan)
    try:
        next(train(first, case))
        without_memory(first, case)
    except torch.OutOfMemoryError:  # here it still has the frames of the step
        end(first)
        gc.collect()
        device.reap()
        counts = arena.counts()
        assert (counts.allocated, counts.reserved) == (0, 0)
        second, _ = make(case, plan)
        arena.reset_peaks()
        found = list(train(second, case))
        assert arena.counts().most_reserved <= plan.gpu_peak_bytes
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    else:
        pytest.fail("the step had memory enough")


@pytest.mark.parametrize(("slices", "clip"), [(1, None), (2, 0.5)])
def test_a_plan_at_the_least_possible_budget_runs_under_its_cap(
    device: Device, slices: int, clip: float | None, request: pytest.FixtureRequest
) -> None:
    case = Case("llama", "keep", slices=slices, clip=clip)
    plan = least_plan(placed_chain("llama", torch.float32), slices=slices, clip=clip is not None)
    wanted = expected(case)
    engine, arena = request.getfixturevalue("engine_in")(case, plan)
    device.queues.set_mood(Mood.drawn(6 - slices))
    found = list(train(engine, case))
    assert arena.counts().most_reserved <= plan.gpu_peak_bytes <= plan.gpu_budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_each_thread_that_computes_has_its_workspace_of_matrix_products_in_the_plan(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has a handle of cuBLAS for each thread, and a workspace for each handle, and keeps both."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:1")  # as large as logits
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    monkeypatch.setattr("planner.schedule.places.PAGE_BYTES", 2**12)
    case = Case("llama", "mixed", slices=2, clip=0.5)
    chain = chain_of(make_model("llama"), device=CUDA, arranged=True)
    plan = placed(PLANS["mixed"](chain, slices=2, clip=True), chain)
    wanted = expected(case, 4)
    device.workspaces.clear()
    with arena_on(device) as arena:
        model = make_model("llama")
        engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=0.5, device=CUDA)
        try:
            found = []
            for step, tensor in enumerate(train(engine, case, 4)):
                found.append(tensor)
                if step == 0:
                    calm = Calm(device, arena, plan)
                if step < 3:
                    engine.evaluate([batch_of(k, length=8) for k in range(6)])
                    engine.generate([[5, 6, 7], [9]], new_tokens=3, pad=2)
            calm.check()
        finally:
            engine.close()
            device.workspaces.clear()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["mixed", "keep"])
def test_layers_of_own_code_keep_to_their_places_at_all_lengths(
    device: Device, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """At 32 tokens results are as large as weights."""
    monkeypatch.setattr("planner.schedule.places.PAGE_BYTES", 2**16)
    monkeypatch.setattr("tests.support.mutants.model.Layer", LooksAtData)
    chain = chain_of(Model(torch.float32), batch_of(length=64), device=CUDA, arranged=True)
    plan = placed(PLANS[kind](chain, slices=2, clip=True), chain)
    assert plan.options[1:-1] == ("eager",) * 3
    model, plain_model = Model(torch.float32), Model(torch.float32).to(CUDA)
    settings = {"optimizer": adamw(model), "max_grad_norm": 0.5, "device": CUDA}
    plain, wanted = PlainEngine(plain_model, **settings), []
    for step, lengths in enumerate(LENGTHS):
        batches, rest = of_lengths(step, lengths)
        wanted.append(torch.stack(plain.step(batches, learning_rate=learning_rate(step), **rest).losses).cpu())
    with arena_on(device) as arena:
        engine = Engine(model, plan=plan, chain=chain, **settings)
        try:
            for step, lengths in enumerate(LENGTHS):
                batches, rest = of_lengths(step, lengths)
                result = engine.step(batches, learning_rate=learning_rate(step), **rest)
                assert torch.equal(torch.stack(result.losses).cpu(), wanted[step]), step
                if step == 0:
                    calm = Calm(device, arena, plan)
            calm.check()
        finally:
            engine.close()

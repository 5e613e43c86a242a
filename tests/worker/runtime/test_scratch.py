"""What kernels allocate for themselves has places in plans: on an emulated device whose kernels do as a card's. Some
tests take seconds: models are traced and trained on an emulated device."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.graph import scratch
from planner.schedule.allocations import allocations
from planner.schedule.chain import Chain
from planner.schedule.compile import Program, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from planner.schedule.plan import Plan
from tests.support.arena import arena_on, placed
from tests.support.cuda import kernels
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of
from tests.support.engines import learning_rate
from tests.support.late_engines import CUDA, PLANS
from tests.support.late_waits import a_step
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.engine.gradients import Gradients
from worker.runtime.arena import Counts, NoPlaces
from worker.runtime.cpu import CpuMachine

pytestmark = pytest.mark.emulated

STEPS = 3
aten = torch.ops.aten
NARROW = torch.bfloat16
make = functools.partial(make_model, "llama", width=128, dropout=0.0)


@pytest.fixture(autouse=True)
def _kernels_of_a_card(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("planner.schedule.places.SMALL_BYTES", 2048)
    monkeypatch.setattr("planner.schedule.places.PAGE_BYTES", 2**16)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # the device has no such library
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", kernels.attention)
    device.scratch = True
    scratch.forget()
    yield
    scratch.forget()


def tried(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> scratch.Scratch | None:
    with scratch.trials():
        return scratch.scratch_of(func, args, kwargs)


@pytest.mark.parametrize(
    ("shape", "strict", "said"),
    [
        ((4, 16, 16, 512, 64), False, 4.031),
        ((4, 16, 16, 512, 64), True, 8.031),
        ((1, 32, 8, 512, 128), False, 6.016),
        ((1, 32, 8, 512, 128), True, 14.016),
    ],
)
def test_attentions_backward_needs_beside_its_gradients_what_an_h100_says(
    device: Device, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], strict: bool, said: float
) -> None:
    """In units of the query: benchmarks/results/card/2026-11-26-h100-facts.json."""
    monkeypatch.setattr(kernels, "multiprocessors", 132)
    batch, heads, of_keys, length, width = shape
    q, k, v = (
        torch.empty(batch, n, length, width, dtype=torch.bfloat16, device=CUDA) for n in (heads, of_keys, of_keys)
    )
    out, logsumexp, *rest = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    given = torch.empty_like(q), q, k, v, out, logsumexp, *rest[:4], 0.0, True, *rest[4:6]
    torch.use_deterministic_algorithms(strict)
    try:
        found = tried(torch.ops.aten._scaled_dot_product_flash_attention_backward.default, given, {})
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is not None
    assert (found.peak_bytes - q.nbytes - 2 * k.nbytes) / q.nbytes == pytest.approx(said, abs=5e-4)
    assert [found.results[n] for n, size in found.events if n in found.results] == [0, 1, 2]


def test_the_arena_and_pytorchs_own_allocator_say_the_same_of_an_operation(device: Device) -> None:
    found = []
    for memory in (contextlib.nullcontext(), arena_on(device)):
        scratch.forget()
        with memory:
            rows = torch.ones(64, 128, dtype=torch.bfloat16, device=CUDA)
            found.append(tried(torch.ops.aten.sum.dim_IntList, (rows, [0]), {}))
            del rows
    of_rows = 16 * 4 * 64 * 128
    assert found[0] == scratch.Scratch(((0, 256), (1, of_rows), (2, 512), (2, 0), (1, 0)), {0: 0})
    assert found == [found[0]] * 2


def test_the_allocators_history_is_recorded_with_cheap_stacks_and_by_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **given: asked.append(given))
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    scratch.History().begin()
    assert [given["stacks"] for given in asked] == ["python"]
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True)
    with pytest.raises(RuntimeError, match="somebody else"):
        scratch.History().begin()


def test_what_allocates_its_results_alone_has_none() -> None:
    on_device, on_host = (torch.ones(64, 64, device=device) for device in (CUDA, "cpu"))
    assert tried(torch.ops.aten.mm.default, (on_device, on_device), {}) is None
    assert tried(torch.ops.aten.sum.dim_IntList, (on_host, [0]), {}) is None


def test_an_operation_for_which_the_gpu_has_no_room_is_not_tried_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeTensorMode():
        huge = torch.empty(2**20, 2**20, device=CUDA)
    with caplog.at_level(logging.INFO):
        assert tried(torch.ops.aten.sum.dim_IntList, (huge, [0]), {}) is None
    assert "what aten.sum.dim_IntList allocates for itself is not known: CUDA out of memory" in caplog.text
    assert not scratch._known, "another time there may be room"


def test_outside_of_a_planner_nothing_is_tried() -> None:
    rows = torch.ones(64, 128, device=CUDA)
    assert scratch.scratch_of(aten.sum.dim_IntList, (rows, [0]), {}) is None
    assert not scratch._known


def test_what_looks_at_its_data_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("it was tried")

    monkeypatch.setattr(scratch, "_tried", fails)
    x, few = torch.ones(64, device=CUDA), torch.ones(8, device=CUDA)
    assert tried(aten.masked_scatter.default, (x, x > 0, few), {}) is None
    assert tried(aten.masked_scatter_.default, (x, x > 0, few), {}) is None
    assert tried(aten.binary_cross_entropy.default, (x, x), {}) is None


@pytest.mark.parametrize(
    ("said", "raised"),
    [
        ("CUDA error: device-side assert triggered", True),
        ("sum_cuda does not have a deterministic implementation", False),
        ("linalg.cholesky: the input is not positive-definite", False),
    ],
)
def test_only_an_error_of_the_device_ends_planning(monkeypatch: pytest.MonkeyPatch, said: str, raised: bool) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(scratch, "_tried", fails)
    rows = torch.ones(64, 128, device=CUDA)
    with pytest.raises(RuntimeError, match="CUDA error") if raised else contextlib.nullcontext():
        assert tried(aten.sum.dim_IntList, (rows, [0]), {}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_first", [True, False], ids=["begins the sum", "with rows aside"])
def test_a_tied_embeddings_rows_are_added_in_the_memory_that_the_plan_counts(
    device: Device, dtype: torch.dtype, head_first: bool
) -> None:
    """Under deterministic algorithms, whose `index_add_` copies what it adds: 67.5 MB beside 8192 x 4096 on an H100."""
    rows, width, count = 512, 64, 300
    tokens = torch.randperm(rows, generator=torch.Generator().manual_seed(1))[:count]
    head, embedding, begun = (torch.randn(rows, width).to(dtype) for _ in range(3))
    others = torch.ones(rows, dtype=torch.bool).index_fill_(0, tokens, False)
    embedding[others] = 0
    wanted = head + embedding if head_first else begun + (head + embedding)
    torch.use_deterministic_algorithms(True)
    try:
        with arena_on(device) as arena:
            items = {} if head_first else {"g:e": [begun.to(CUDA)]}
            sums = Gradients(
                SimpleNamespace(items=items),
                CpuMachine(metered=False),
                NoPlaces(),
                {},
                order=("e",),
                by_rows=("e",),
                max_norm=None,
            )
            sums.begin_round([tokens])
            sums.add("e", 0, head.to(CUDA), fresh=True, last_block=True)
            made = embedding.to(CUDA)
            arena.reset_peaks()
            before = arena.counts().allocated
            sums.add("e", 0, made, fresh=True, last_block=False)
            beside = arena.counts().most_allocated - before
            found = sums.of("e").cpu()
            del sums, items, made
    finally:
        torch.use_deterministic_algorithms(False)
    index_bytes = 8 * count
    assert beside <= count * width * dtype.itemsize + 2 * index_bytes
    assert torch.equal(found, wanted)


def test_trying_operations_changes_no_random_numbers(device: Device) -> None:
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    rows = torch.ones(64, 128, device=CUDA)
    assert tried(torch.ops.aten.sum.dim_IntList, (rows, [0]), {}) is not None
    assert torch.equal(torch.cuda.get_rng_state(), before)


def of_lengths(step: int, lengths: tuple[int, ...]) -> tuple[list[dict[str, Tensor]], dict[str, object]]:
    """A step's data, a slice of each of these lengths."""
    batches = [batch_of(10 * step + k, length=length) for k, length in enumerate(lengths)]
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    return batches, {"seeds": [1000 * step + k for k in range(len(lengths))], "num_items_in_batch": count}


LENGTHS = [(64, 64), (64, 64), (64, 64), (16, 64), (64, 32), (16, 16), (64, 64)]


def counts_of(
    device: Device, plan: Plan, chain: Chain, lengths: list[tuple[int, ...]], dtype: torch.dtype = NARROW
) -> Counts:
    """Of steps with slices of these lengths, whose losses are plain PyTorch's, in a trainer: a process that has planned
    nothing."""
    scratch.forget()
    model, plain_model = make(dtype), make(dtype).to(CUDA)
    settings = {"optimizer": adamw(model), "max_grad_norm": 0.5, "device": CUDA}
    plain, wanted = PlainEngine(plain_model, **settings), []
    for step, its in enumerate(lengths):
        batches, rest = of_lengths(step, its)
        wanted.append(torch.stack(plain.step(batches, learning_rate=learning_rate(step), **rest).losses).cpu())
    with arena_on(device) as arena:
        engine = Engine(model, plan=plan, chain=chain, **settings)
        device.queues.set_mood(Mood.drawn(5))
        try:
            for step, its in enumerate(lengths):
                batches, rest = of_lengths(step, its)
                with a_step(device, first=step < len(lengths) - 1):
                    result = engine.step(batches, learning_rate=learning_rate(step), **rest)
                assert torch.equal(torch.stack(result.losses).cpu(), wanted[step]), step
            assert not scratch._known, "a trainer tries nothing: its memory is full"
            return arena.counts()
        finally:
            engine.close()


def planned(kind: str, dtype: torch.dtype = NARROW) -> tuple[Plan, Chain]:
    chain = chain_of(make(dtype), batch_of(length=64), device=CUDA, arranged=True)
    return placed(PLANS[kind](chain, slices=2, clip=True), chain), chain


def live_bytes(program: Program, chain: Chain) -> int:
    """The most that tensors have at one time."""
    found = allocations(program, chain)
    sizes = {event.number: event.bytes for standing in found.standing.values() for event in standing}
    most = now = sum(sizes.values()) + found.others_bytes
    for event in (event for _, events in found.steps for event in events):
        now += event.bytes or -sizes[event.number]
        sizes[event.number] = event.bytes
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mixed", NARROW), ("recompute", NARROW), ("keep", NARROW), ("mixed", torch.float32)]
)
def test_a_step_runs_in_the_memory_of_a_plan_that_knows_what_its_kernels_allocate(
    device: Device, kind: str, dtype: torch.dtype
) -> None:
    """In fp32 the sum that the last norm's backward ends with leaves its turn, and autograd makes it in place."""
    plan, chain = planned(kind, dtype)
    program = compile_program(plan, chain)
    assert live_bytes(program, chain) <= gpu_peak_bytes(program, chain) <= plan.gpu_peak_bytes == plan.gpu_budget_bytes
    counts = counts_of(device, plan, chain, LENGTHS[:STEPS], dtype)
    assert counts.strays == 0
    assert counts.most_reserved <= plan.gpu_peak_bytes


def test_a_plan_that_does_not_know_it_takes_more_than_it_says(device: Device) -> None:
    device.scratch = False
    plan, chain = planned("mixed")
    device.scratch = True
    counts = counts_of(device, replace(plan, gpu_budget_bytes=4 * plan.gpu_peak_bytes), chain, LENGTHS[:STEPS])
    assert counts.strays > 0
    assert counts.most_reserved > plan.gpu_peak_bytes


@pytest.mark.parametrize(("kind", "strict"), [("mixed", False), ("recompute", True)])
def test_slices_of_other_lengths_have_places_for_it_too(device: Device, kind: str, strict: bool) -> None:
    torch.use_deterministic_algorithms(strict)
    try:
        plan, chain = planned(kind)
        counts = counts_of(device, plan, chain, LENGTHS)
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts.strays == 0
    assert counts.most_reserved <= plan.gpu_peak_bytes

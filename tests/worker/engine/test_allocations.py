"""What the planner says that a step allocates, tensor by tensor, is what the engine does."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from planner.cpu.meter import Meter
from planner.schedule.allocations import allocations
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan, streaming_plan
from tests.support.engines import CPU, data
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)


class Log(Meter):
    """A meter that writes down what comes and goes: a size, or with a minus that of what goes."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[int] = []

    def add(self, tensor: torch.Tensor) -> None:
        with self._lock:
            known = len(self._sizes)
            super().add(tensor)
            if len(self._sizes) > known and (size := self.bytes_of(tensor)):
                self.events.append(size)

    def _drop(self, key: int, reference: object) -> None:
        with self._lock:
            if size := self._sizes[key]:
                self.events.append(-size)
            super()._drop(key, reference)


CODES = {}  # generated code, by model and dtype: to save time


@functools.cache
def arranged_chain(name, dtype):
    return chain_of(model_of(name, dtype), arranged=True, chunk_rows=7 * (name in LOSSES))


def of_rows(logits, labels, vocab_size, num_items_in_batch=1, **_):
    """A loss that compares the two rows."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    each = F.cross_entropy(logits.float().view(-1, vocab_size), targets, reduction="none").view(labels.shape)
    return F.softplus(torch.sub(*each.sum(1))) / num_items_in_batch


LOSSES = {"chunks": None, "chunks-of-rows": of_rows}


def model_of(name, dtype):
    """In bf16 without dropout, whose noise on the CPU takes memory that it does not take on CUDA. "frozen": a Llama of
    which the norms and the last layer are trained. One of `LOSSES`: a Llama with that loss, whose head is in chunks."""
    dropout = 0.1 if dtype == torch.float32 else 0.0
    model = make_model("llama" if name in LOSSES else name.replace("frozen", "llama"), dtype, dropout=dropout)
    if loss := LOSSES.get(name):
        model.loss_function = loss
    if name == "frozen":
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in parameter_name or "layers.2" in parameter_name)
    return model


def tokens_of(batches):
    """Distinct tokens of the slices up to each."""
    ids = [batch["input_ids"].flatten() for batch in batches]
    return tuple(len(torch.cat(ids[: k + 1]).unique()) for k in range(len(ids)))


def logged(monkeypatch, name, plan_of, *, clip, dtype, **shape):
    """Events of a step in the middle as the engine makes them, the plan and the chain."""
    monkeypatch.setattr("worker.runtime.cpu.Meter", Log)
    model, chain = model_of(name, dtype), arranged_chain(name, dtype)
    count = shape.get("slices", 1) * shape.get("rounds", 1)
    if shape.get("rounds", 1) == 1:  # as many rows are kept aside of a tied embedding as the data has tokens
        chain = replace(chain, distinct_tokens=tokens_of(data(2, count)[0]))
    plan = plan_of(chain, clip=clip is not None, **shape)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=clip, device=CPU, metered=True)
    engine._rounds.codes = CODES.setdefault((name, dtype), {})
    try:
        for _ in range(3):
            batches, rest = data(2, count)
            engine._machine.meter.events.clear()
            result = engine.step(batches, learning_rate=1e-3, **rest)
            events, peak = list(engine._machine.meter.events), result.peak_bytes
            del result
    finally:
        engine.close()
    return events, peak, plan, chain


def said(plan, chain):
    """Events as the planner has them, and the most bytes there are."""
    found = allocations(compile_program(plan, chain), chain)
    sizes = {e.number: e.bytes for standing in found.standing.values() for e in standing}
    events, now = [], sum(sizes.values()) + found.others_bytes
    most = now
    for op, steps in found.steps:
        scratch = {e.number for e in steps if e.bytes} if op.kind is OpKind.UPDATE else ()  # which the CPU does without
        for event in steps:
            if event.number in scratch:
                continue
            sizes.setdefault(event.number, event.bytes)
            size = event.bytes or -sizes[event.number]
            events.append(size)
            now += size
            most = max(most, now)
    return events, most


def in_order(events, least):
    """Those of at least so many bytes; what goes between two that come in any order."""
    found, gone = [], []
    for size in events:
        if size <= -least:
            gone.append(size)
        elif size >= least:
            found += [*sorted(gone), size]
            gone = []
    return found + sorted(gone)


CASES = [
    ("llama", mixed_plan, {"slices": 1}),
    ("llama", mixed_plan, {"slices": 3, "clip": 0.5}),
    ("llama", mixed_plan, {"slices": 2, "clip": 0.5, "ahead": True}),
    ("llama", mixed_plan, {"slices": 2, "rounds": 2}),
    ("llama", mixed_plan, {"slices": 1, "rounds": 4}),
    ("llama", streaming_plan, {"slices": 2}),
    *(("llama", resident_plan, {"slices": 2, "option": option}) for option in ("keep", "recompute", "offload-all")),
    ("llama", resident_plan, {"slices": 2, "option": "offload-input-2"}),  # of a set that is saved, it stays
    ("gpt2", mixed_plan, {"slices": 1}),
    ("gpt2", mixed_plan, {"slices": 3}),
    ("qwen2", streaming_plan, {"slices": 2}),
    ("frozen", resident_plan, {"slices": 2}),
    ("frozen", resident_plan, {"slices": 2, "clip": 0.5, "option": "recompute"}),
    ("bloom", resident_plan, {"slices": 2, "option": "offload-input"}),
    ("llama", resident_plan, {"slices": 2, "option": "offload-all", "copy_turns": 2}),
    ("chunks", mixed_plan, {"slices": 2}),
    ("chunks-of-rows", mixed_plan, {"slices": 2}),
]


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("name", "plan_of", "shape"), CASES)
def test_a_step_allocates_and_frees_what_the_planner_says_in_its_order(monkeypatch, name, plan_of, shape, dtype):
    events, peak, plan, chain = logged(monkeypatch, name, plan_of, dtype=dtype, clip=shape.pop("clip", None), **shape)
    expected, most = said(plan, chain)
    got, wanted = in_order(events, 2048), in_order(expected, 2048)
    assert got == wanted
    assert peak <= most <= gpu_peak_bytes(compile_program(plan, chain), chain)

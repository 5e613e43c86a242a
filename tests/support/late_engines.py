"""Engines on the emulated device beside plain PyTorch on the same device."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.muon import Muon
from planner.optimizers.table import NONE
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from tests.support.cuda.device import Device
from tests.support.cuda.session import the_device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan, muon, resident_plan, rounded_of, streaming_plan
from tests.support.engines import data, learning_rate
from tests.support.late_waits import a_step
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CUDA = torch.device("cuda")
PLANS: dict[str, Callable[..., Plan]] = {
    "mixed": mixed_plan,
    "ahead": functools.partial(mixed_plan, ahead=True),
    "streaming": streaming_plan,
    **{o: functools.partial(resident_plan, option=o) for o in ("keep", "recompute", "offload", "offload-all")},
}


@dataclass(frozen=True)
class Case:
    """A tiny model under a plan of PLANS."""

    model: str
    plan: str
    dtype: torch.dtype = torch.float32
    slices: int = 1
    rounds: int = 1
    clip: float | None = None
    rounded: bool = False  # moments are in 8 bits
    muon: bool = False  # for matrices

    def __str__(self) -> str:
        shape = f"{self.rounds}x{self.slices}" + "-clipped" * bool(self.clip)
        shape += "-rounded" * self.rounded + "-muon" * self.muon
        return f"{self.model}-{self.plan}-{shape}-{'bf16' if self.dtype.itemsize == 2 else 'fp32'}"

    @property
    def batches(self) -> int:
        """Of a step."""
        return self.slices * self.rounds


@functools.cache
def chain_for(model: str, dtype: torch.dtype, rounded: bool = False, muon: bool = False) -> Chain:
    """For slices of two rows."""
    made = make_model(model, dtype)
    optimizers = Muon.chosen(made) if muon else rounded_of(made) if rounded else NONE
    return chain_of(made, device=CUDA, optimizers=optimizers)


def plan_for(case: Case) -> Plan:
    """Without a budget, so without a cap: what else is on the device is not the plan's."""
    rounds = {"rounds": case.rounds} if case.rounds > 1 else {}
    chain = chain_for(case.model, case.dtype, case.rounded, case.muon)
    plan = PLANS[case.plan](chain, slices=case.slices, clip=case.clip is not None, **rounds)
    return replace(plan, gpu_budget_bytes=0)


_CODES: dict[Any, Any] = {}


def engine_for(case: Case, plan: Plan | None = None) -> Engine:
    """An engine on the device. Generated code is shared by all engines of a model, to save time."""
    model = make_model(case.model, case.dtype)
    engine = Engine(
        model,
        plan=plan or plan_for(case),
        chain=chain_for(case.model, case.dtype, case.rounded, case.muon),
        optimizer=(muon if case.muon else adamw)(model),
        max_grad_norm=case.clip,
        device=CUDA,
    )
    engine._rounds.codes = _CODES.setdefault((case.model, case.dtype), {})
    return engine


def train(engine: Engine | PlainEngine, case: Case, steps: int = 3, drains: bool = False) -> Iterator[Tensor]:
    """Losses and norms of the steps, then the state, all on the host and by the time that each is asked for. No step of
    an engine waits for the device but where that is stated (late_waits.py). `drains`: after every second one."""
    gc.collect()  # the host memory of an engine before, whose end waits
    for step in range(steps):
        batches, rest = data(step, case.batches)
        watched = isinstance(engine, Engine)
        with a_step(the_device(), first=step == 0, second=step == 1) if watched else contextlib.nullcontext():
            result = engine.step(batches, learning_rate=learning_rate(step), **rest)
        yield torch.stack([*result.losses, *([] if result.grad_norm is None else [result.grad_norm])]).cpu()
        if drains and step % 2:
            engine.drain()
    for _, parts in engine.state():
        found = AdamW8bit().in_fp32(parts)
        yield from (found[part].clone() for part in sorted(found))


@functools.cache
def expected(case: Case, steps: int = 3) -> list[Tensor]:
    """What plain PyTorch gives on the device."""
    model = make_model(case.model, case.dtype)
    settings: dict[str, Any] = {"optimizer": (muon if case.muon else adamw)(model), "max_grad_norm": case.clip}
    settings["rounded"] = rounded_of(model) if case.rounded else ()
    return list(train(PlainEngine(model.to(CUDA), device=CUDA, **settings), case, steps))


def differences(device: Device, case: Case, mood: Mood, steps: int = 3, *, drains: bool = False) -> list[int]:
    """Which of the losses and tensors of the state are not plain PyTorch's, bit by bit."""
    wanted = expected(case, steps)
    engine = engine_for(case)
    device.queues.set_mood(mood)
    try:
        found = list(train(engine, case, steps, drains))
    finally:
        engine.close()
        device.queues.set_mood(Mood())
    return [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]

"""A short training with something wrong beside plain PyTorch."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue, compile_program
from planner.schedule.plan import Plan
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.engines import data, learning_rate
from tests.support.mutants.changes import Mutant
from tests.support.mutants.interpreter import Hold, Watch, WatchedInterpreter, WatchedTickets, Where
from tests.support.mutants.model import Model
from tests.support.plain_engine import PlainEngine
from worker.engine.engine import Engine

CUDA = torch.device("cuda")
STEPS = 3


@dataclass(frozen=True)
class Case:
    """The tiny model under `mixed_plan`. `clip`: a norm of 0.1 is exceeded by each step, one of 100 by none."""

    dtype: torch.dtype = torch.float32
    rounds: int = 1
    clip: float | None = None
    ahead: bool = False

    def __str__(self) -> str:
        words = ["bf16" if self.dtype.itemsize == 2 else "fp32", f"{self.rounds} rounds" if self.rounds > 1 else ""]
        words += [f"clipped at {self.clip:g}" if self.clip else "", "ahead of the norm" if self.ahead else ""]
        return ", ".join(filter(None, words))

    @property
    def clips(self) -> bool:
        """Whether each step does."""
        return self.clip == ALWAYS


ALWAYS, NEVER = 0.1, 100.0
CASES = (
    Case(clip=ALWAYS),
    Case(torch.bfloat16),
    Case(rounds=2),
    Case(torch.bfloat16, clip=ALWAYS, ahead=True),
    Case(clip=NEVER, ahead=True),
)


@functools.cache
def chain_for(dtype: torch.dtype) -> Chain:
    return chain_of(Model(dtype), device=CUDA)


@functools.cache
def plan_for(case: Case) -> Plan:
    """Without a cap."""
    chain = chain_for(case.dtype)
    plan = mixed_plan(chain, rounds=case.rounds, clip=case.clip is not None, ahead=case.ahead)
    return replace(plan, gpu_budget_bytes=0)


@functools.cache
def program_of(case: Case) -> Program:
    return compile_program(plan_for(case), chain_for(case.dtype))


_CODES: dict[torch.dtype, Any] = {}


def _engine(case: Case) -> Engine:
    model = Model(case.dtype)
    engine = Engine(
        model,
        plan=plan_for(case),
        chain=chain_for(case.dtype),
        optimizer=adamw(model),
        max_grad_norm=case.clip,
        device=CUDA,
    )
    engine._rounds.codes = _CODES.setdefault(case.dtype, {})
    return engine


def _train(engine: Engine | PlainEngine, case: Case, watch: Watch | None = None) -> Iterator[Tensor]:
    for step in range(STEPS):
        batches, rest = data(step, case.rounds, length=8)
        if watch is not None and step == 1:
            watch.on = True  # until it is held back: its queue may only come to it when the next step has begun
        result = engine.step(batches, learning_rate=learning_rate(step), **rest)
        yield torch.stack([*result.losses, *([] if result.grad_norm is None else [result.grad_norm])]).cpu()
    for _, parts in engine.state():
        yield from (parts[part].clone() for part in sorted(parts))


@functools.cache
def expected(case: Case) -> tuple[Tensor, ...]:
    """What plain PyTorch gives on the device."""
    model = Model(case.dtype).to(CUDA)
    settings: dict[str, Any] = {"optimizer": adamw(model), "max_grad_norm": case.clip}
    return tuple(_train(PlainEngine(model, device=CUDA, **settings), case))


def is_noticed(device: Device, case: Case, mutant: Mutant | None, hold: Hold) -> bool:
    """Whether numbers are not plain PyTorch's, or an error came."""
    wanted = expected(case)
    watch = WatchedInterpreter.watch = Watch(device, mutant, hold)
    with (
        _engines_end_here(),
        mock.patch("worker.runtime.cuda.CudaInterpreter", WatchedInterpreter),
        mock.patch("worker.runtime.queues.Tickets", WatchedTickets),
    ):
        engine = _engine(case)
        try:
            return not all(torch.equal(a, b) for a, b in zip(_train(engine, case, watch), wanted, strict=True))
        except Exception:  # whatever comes of it
            return True
        finally:
            device.queues.set_mood(Mood())
            with contextlib.suppress(RuntimeError):
                engine.close()


@contextlib.contextmanager
def _engines_end_here() -> Iterator[None]:
    """Their memory waits for the device when it ends: not inside, where a device that is held back waits for others."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def holds(mutant: Mutant) -> Iterator[Hold]:
    """The moods that are made for it: what should have been waited for comes late."""
    yield Hold(mutant.on, mutant.op, Where.STREAM)
    yield Hold(mutant.on, mutant.op, Where.HOST)
    yield Hold(mutant.on, None, Where.STREAM)
    yield Hold(mutant.on, None, Where.HOST)


def noticed_by(device: Device, case: Case, mutant: Mutant) -> Hold | None:
    """The first mood in which it is noticed."""
    return next((hold for hold in holds(mutant) if is_noticed(device, case, mutant, hold)), None)


def explanation(case: Case, mutant: Mutant) -> str:
    """Why nothing comes of it; empty where something must."""
    program = program_of(case)
    by_name = {op.name: op for op in program.ops}
    op, on = by_name[mutant.op], by_name[mutant.on]
    if case.clips and op.kind is OpKind.CPU_AHEAD and on.kind is OpKind.SEND:
        return "the norm clips in each step: the update ahead of it is made once more, when its gradient is there"
    if not case.clips and on.kind is OpKind.CPU_REPLAY and _waits_elsewhere(program, op, on):
        return (
            "the norm never clips: there is nothing to be done once more, and a fetch before it waits for an update "
            "that stands behind the one ahead of the norm"
        )
    if not case.clips and on.kind is OpKind.CLIP:
        return "the norm never clips: the coefficient that is read too soon is that of the step before, 1 as well"
    if op.kind is OpKind.FREE and on.kind is OpKind.SEND and _next_release_waits(program, op, on):
        return "the release after it, with nothing in between that takes memory, waits for a later copy of that stream"
    return ""


def _waits_elsewhere(program: Program, op: Op, on: Op) -> bool:
    """Whether the update ahead of the norm that `on` may do once more, in the step before, is done when `op` comes:
    what stands before `op` on its queue waits for what stands behind that update on its own."""
    number = {one.name: n for n, one in enumerate(program.ops)}
    (ahead,) = (one for one in program.queue(on.queue) if one.kind is OpKind.CPU_AHEAD and one.names == on.names)
    return any(
        program.ops[number[name]].queue is ahead.queue and number[name] > max(number[ahead.name], number[op.name])
        for one in program.queue(op.queue)
        if number[one.name] < number[op.name]
        for name in one.waits
    )


def _next_release_waits(program: Program, op: Op, on: Op) -> bool:
    number = {one.name: n for n, one in enumerate(program.ops)}
    for later in program.queue(Queue.COMPUTE):
        if number[later.name] > number[op.name]:
            if later.kind is not OpKind.FREE:
                return False
            found = [program.ops[number[name]] for name in later.waits]
            if any(one.queue is on.queue and number[on.name] < number[one.name] < number[later.name] for one in found):
                return True
    return False

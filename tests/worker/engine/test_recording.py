"""What is recorded of two steps: when operations ran, in the order that the program asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner.schedule.compile import OpKind, Program, Queue, compile_program
from planner.schedule.measured import Measured
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.engines import data, learning_rate
from tests.support.late_engines import Case, chain_for, engine_for, plan_for
from worker.engine.engine import Engine


def recorded_steps(engine: Engine, slices: int) -> Measured:
    """After a step that nobody records."""
    found = None
    for step in range(5):
        assert found is None
        found = engine.recorded()
        if found is None:
            batches, rest = data(step, slices)
            losses = engine.step(batches, learning_rate=learning_rate(step), **rest).losses
            assert torch.stack(losses).cpu().isfinite().all()
        if step == 0:
            assert not engine.is_recording
            engine.record()
    assert found is not None and not engine.is_recording
    return found


def check_order(found: Measured, program: Program, *, one_clock: bool = True) -> None:
    """Nothing begins before what it waits for has ended; each queue does one thing at a time, in order. Without
    `one_clock` the CPU's queue has one of its own, which is nearly right."""
    assert found.is_of(program) and found.first_step == 2 and found.step_ns(program) > 0
    place = {op.name: n for n, op in enumerate(program.ops)}
    times = zip(program.ops, found.start_ns[0], found.end_ns[0], strict=True)
    timed = {op.kind for op, start, end in times if end > start}
    assert timed >= {OpKind.RUN, OpKind.FETCH, OpKind.SEND, OpKind.UPDATE, OpKind.CPU_UPDATE}
    for step in range(2):
        free = dict.fromkeys(Queue, -(2**62))
        for n, op in enumerate(program.ops):
            start, end = found.start_ns[step][n], found.end_ns[step][n]
            if end == start == 0:
                continue
            assert free[op.queue] <= start <= end, op.name
            free[op.queue] = end
            for name in op.waits:
                before = step if place[name] < n else step - 1
                if before >= 0 and (one_clock or Queue.CPU not in (op.queue, program.ops[place[name]].queue)):
                    assert found.end_ns[before][place[name]] <= start, f"{op.name} after {name}"


@pytest.mark.parametrize("shape", [{"slices": 2, "clip": 0.5}, {"slices": 1}], ids=str)
def test_operations_of_the_cpus_queues_are_recorded_in_order(make: Callable[..., Any], shape: dict[str, Any]) -> None:
    engine, _ = make("llama", **shape)
    found = recorded_steps(engine, shape["slices"])
    check_order(found, compile_program(engine.plan, engine.chain))


def test_whatever_drains_the_engine_ends_a_recording(make: Callable[..., Any]) -> None:
    engine, _ = make("llama")
    batches, rest = data(0, 1)
    engine.record()
    engine.step(batches, learning_rate=1e-3, **rest)
    engine.drain()
    assert not engine.is_recording and engine.recorded() is None


@pytest.mark.emulated
def test_streams_are_recorded_in_the_order_in_which_they_run(device: Device) -> None:
    case = Case("llama", "mixed", clip=0.5)
    engine = engine_for(case)
    device.queues.set_mood(Mood.drawn(5))
    try:
        found = recorded_steps(engine, 1)
    finally:
        engine.close()
    check_order(found, compile_program(plan_for(case), chain_for("llama", torch.float32)), one_clock=False)

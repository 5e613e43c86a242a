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
from worker.runtime.recording import Recording


def recorded_steps(engine: Engine, slices: int, *, drains: bool = False) -> Measured:
    """After a step that nobody records. `drains`: after each."""
    found = None
    for step in range(5):
        assert found is None
        found = engine.recorded()
        if found is None:
            batches, rest = data(step, slices)
            losses = engine.step(batches, learning_rate=learning_rate(step), **rest).losses
            assert torch.stack(losses).cpu().isfinite().all()
        if drains:
            engine.drain()
        if step == 0:
            assert engine.recording is None
            engine.record()
    assert found is not None and engine.recording is None
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


def test_what_comes_between_two_steps_is_not_recorded(make: Callable[..., Any]) -> None:
    """As where a job saves after each step: the updates that one leaves to the next end before."""
    engine, _ = make("llama")
    found = recorded_steps(engine, 1, drains=True)
    assert found.paused
    check_order(found, compile_program(engine.plan, engine.chain))


def test_the_clock_of_a_recording_stands_still_between_a_drain_and_the_next_step(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make("llama")
    program = compile_program(engine.plan, engine.chain)
    times = iter((100, 1000))
    monkeypatch.setattr("worker.runtime.recording.now", lambda: next(times))
    recording = Recording(program)
    for step, begin in enumerate((10, 1010)):
        recording.begin_step(step + 1)
        for op in program.ops:
            recording.add(op, step + 1 - op.carried, begin, begin + 40)
        if step == 0:
            recording.drained()
            recording.drained()  # nothing has run since
    found = recording.measured()
    assert found.paused and found.step_ns(program) == 100
    assert found.end_ns == ((40,) * len(program.ops), (140,) * len(program.ops))


@pytest.mark.emulated
@pytest.mark.parametrize("drains", [False, True])
def test_streams_are_recorded_in_the_order_in_which_they_run(device: Device, drains: bool) -> None:
    case = Case("llama", "mixed", clip=0.5)
    engine = engine_for(case)
    device.queues.set_mood(Mood.drawn(5))
    try:
        found = recorded_steps(engine, 1, drains=drains)
    finally:
        engine.close()
    assert found.paused == drains
    check_order(found, compile_program(plan_for(case), chain_for("llama", torch.float32)), one_clock=False)

"""How often a step calls the driver beside what it computes and copies, and PyTorch's modes look at a block: each call
takes time of the thread that issues. Counted on the emulated device."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.schedule.compile import OpKind, Queue, compile_program
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Event, Stream
from tests.support.engines import data, learning_rate
from tests.support.late_engines import Case, chain_for, engine_for, expected, plan_for, train
from worker.engine.actions import Actions
from worker.engine.rounds import Rounds
from worker.runtime.host_values import HostValues
from worker.runtime.interpreter import Together
from worker.runtime.step_values import StepValues

pytestmark = pytest.mark.emulated
CASE = Case("llama", "streaming", torch.bfloat16, slices=2)


@pytest.fixture
def calls(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """What the second step calls, and how often."""
    found: Counter[str] = Counter()
    inside: set[int] = set()  # threads: while one waits for its turn, another runs the frame

    def counted(owner: Any, name: str, key: str) -> None:
        called = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            found[key] += owner is not HostValues or threading.get_ident() in inside
            return called(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    def enter(self: Rounds, *args: Any, **kwargs: Any) -> Any:
        inside.add(threading.get_ident())
        try:
            return entered(self, *args, **kwargs)
        finally:
            inside.discard(threading.get_ident())

    entered, engine = Rounds.enter, engine_for(CASE)
    try:
        for step in range(2):
            if step:
                monkeypatch.setattr(Rounds, "enter", enter)
                counted(Event, "record", "events")
                counted(Stream, "wait_event", "waits")
                counted(torch.cuda, "stream", "streams")
                counted(HostValues, "__torch_function__", "looks at blocks")
            batches, rest = data(step, CASE.batches)
            engine.step(batches, learning_rate=learning_rate(step), **rest)
            engine.drain()
        yield found
    finally:
        engine.close()


def test_what_travels_together_costs_one_event_and_one_wait(calls: Counter[str]) -> None:
    program = compile_program(plan_for(CASE), chain_for(CASE.model, CASE.dtype))
    kinds = Counter(op.kind for op in program.ops)
    assert kinds[OpKind.RUN] == 18
    assert kinds[OpKind.FETCH] == 67  # more than three a turn
    assert calls["events"] == 48
    assert calls["waits"] == 39


def test_no_operation_changes_its_threads_stream(calls: Counter[str]) -> None:
    # Whoever computes sets it once, with the device, a drain too; batches and the norm's coefficient have their own.
    assert calls["streams"] <= 5 + 2


def test_copies_are_issued_by_whoever_computes_unless_they_wait_for_the_host(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the CPU has always ended its updates before, and host memory is there from the first step."""
    by: dict[str, set[str]] = {}
    performed = Actions.perform

    def perform(self: Actions, ops: Together, values: StepValues) -> None:
        for op in ops:
            if op.queue in (Queue.H2D, Queue.D2H) and values.number > 1:
                by.setdefault(op.name, set()).add(threading.current_thread().name)
        performed(self, ops, values)

    monkeypatch.setattr(Actions, "perform", perform)
    engine = engine_for(CASE)
    try:
        for step in range(3):
            batches, rest = data(step, CASE.batches)
            engine.step(batches, learning_rate=learning_rate(step), **rest)
            engine.drain()  # the CPU has updated all
    finally:
        engine.close()
    assert len(by) > 60
    assert not {"offmate-h2d", "offmate-d2h"} & set().union(*by.values())


def test_a_copy_of_what_the_cpu_has_still_to_update_is_handed_over(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, by = expected(CASE), set[str]()
    performed = Actions.perform

    def perform(self: Actions, ops: Together, values: StepValues) -> None:
        op = ops[0]
        if op.queue is Queue.CPU:
            time.sleep(0.01)  # it is late
        elif op.queue is Queue.H2D:
            by.add(threading.current_thread().name)
        performed(self, ops, values)

    monkeypatch.setattr(Actions, "perform", perform)
    engine = engine_for(CASE)
    try:
        found = list(train(engine, CASE))
    finally:
        engine.close()
    assert "offmate-h2d" in by
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_looks_at_the_frames_operations_does_not_look_at_a_block(calls: Counter[str]) -> None:
    assert calls["looks at blocks"] <= 2 * len(chain_for(CASE.model, CASE.dtype).blocks) * CASE.slices

"""The CUDA interpreter with one thing wrong, on an emulated device that holds one operation back as long as it can."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum

from planner.schedule.compile import Op, Program, Queue
from tests.support.cuda.device import Device
from tests.support.cuda.streams import Mood
from tests.support.mutants.changes import Change, Mutant
from worker.runtime.cuda import CudaInterpreter, CudaMachine
from worker.runtime.interpreter import Performer, Together
from worker.runtime.queues import Tickets
from worker.runtime.step_values import StepValues

PATIENCE_S = 120.0


class Where(StrEnum):
    """Where an operation is held back."""

    STREAM = "on its stream"
    HOST = "before it is issued"


@dataclass(frozen=True, slots=True)
class Hold:
    """`held` comes as late as can be, or, on its stream, right after `until`."""

    held: str
    until: str | None
    where: Where


class Watch:
    """One run: what is wrong, and what is held back, once it is `on`; only the first time that it comes then."""

    def __init__(self, device: Device, mutant: Mutant | None, hold: Hold | None) -> None:
        self.device, self.mutant, self.hold, self.on = device, mutant, hold, False
        self.reached = False  # `until` is issued


class WatchedTickets(Tickets):
    """Knows who waits for what."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: dict[str, tuple[Queue, int]] = {}
        self.patient: set[str] = set()

    def wait(self, queue: Queue, number: int) -> None:
        name = threading.current_thread().name
        self.blocked[name] = (queue, number)
        try:
            super().wait(queue, number)
        finally:
            del self.blocked[name]

    def cannot_go_on(self, name: str) -> bool:
        """Whether the thread waits for what is not done."""
        queue, number = self.blocked.get(name, (Queue.COMPUTE, 0))
        return name in self.patient or self.done[queue] < number


class WatchedInterpreter(CudaInterpreter):
    """See the module. `watch` is to be set before one is made."""

    watch: Watch

    def __init__(self, program: Program, performer: Performer, machine: CudaMachine) -> None:
        super().__init__(program, performer, machine)
        assert isinstance(self._tickets, WatchedTickets)
        self._known = self._tickets
        self.watch.device.queues.patience = self._be_patient
        mutant, by_name = self.watch.mutant, {op.name: op for op in program.ops}
        if mutant is None:
            return
        key, on = id(by_name[mutant.op]), by_name[mutant.on]
        self._on = on
        if mutant.change in (Change.NO_WAIT, Change.NO_TICKET):
            self._hosts[key] = tuple(one for one in self._hosts[key] if one[1] != id(on))
        if mutant.change in (Change.NO_WAIT, Change.NO_EVENT, Change.EVENT_ELSEWHERE):
            self.waits[key] = tuple(one for one in self.waits[key] if one is not on)

    def never_waits(self, op: Op) -> bool:
        """In its queue's thread an operation can come as late as what waits for it lets it."""
        return False

    # -- what is wrong

    def done(self, op: Op) -> None:
        mutant = self.watch.mutant
        if mutant is not None and mutant.on == op.name and id(op) in self._events:
            if mutant.change is Change.NO_RECORD:
                return
            if mutant.change is Change.RECORD_ELSEWHERE:
                assert mutant.stream is not None
                self.watch.device.queues.name = None  # the mark is held back with nothing
                self._events[id(op)].record(self._streams[mutant.stream])
                return
        super().done(op)

    def _wait_elsewhere(self, op: Op) -> None:
        mutant = self.watch.mutant
        if mutant is not None and mutant.change is Change.EVENT_ELSEWHERE and mutant.op == op.name:
            assert mutant.stream is not None
            self._streams[mutant.stream].wait_event(self._events[id(self._on)])

    # -- what is held back

    def run(self, ops: Together, values: StepValues | None) -> None:
        self._wait_elsewhere(ops[0])
        op = self._known_of(ops)
        self._begin(op)
        super().run(ops, values)
        self._end(op)

    def _known_of(self, ops: Together) -> Op:
        """That of the operations which go together by whose name they are held back, or waited for."""
        hold = self.watch.hold
        names = (hold.held, hold.until) if hold is not None else ()
        return next((op for op in ops if op.name in names), ops[-1])

    def wait(self, op: Op) -> None:
        self._wait_elsewhere(op)
        self._begin(op)
        super().wait(op)

    def _begin(self, op: Op) -> None:
        watch, queues = self.watch, self.watch.device.queues
        hold = watch.hold
        if watch.on and hold is not None and hold.held == op.name:
            watch.on = False
            if hold.where is Where.STREAM:
                queues.set_mood(Mood(held=hold.held, until=hold.until))
            else:
                watch.reached = False
                self._be_patient(until=True)
        queues.name = op.name

    def _end(self, op: Op) -> None:
        self.watch.device.queues.name = None
        if self.watch.hold is not None and self.watch.hold.until == op.name:
            self.watch.reached = True

    def _be_patient(self, *, until: bool = False) -> None:
        """Return when no other thread can go on; `until`: or what is to come before is issued."""
        name, deadline = threading.current_thread().name, time.monotonic() + PATIENCE_S
        self._known.patient.add(name)
        try:
            while not (self._known.closed or (until and self.watch.reached) or self._all_stuck()):
                assert time.monotonic() < deadline
                time.sleep(1e-4)
        finally:
            self._known.patient.discard(name)

    def _all_stuck(self) -> bool:
        """They are looked at one after another: what was done meanwhile may have set one going that was looked at."""
        tickets = self._known
        done = dict(tickets.done)
        if not tickets.cannot_go_on("MainThread"):
            return False
        for queue, thread in self._queues.items():
            given = tickets.issued[queue] - len(thread._pending)
            if tickets.done[queue] < given and not tickets.cannot_go_on(f"offmate-{queue}"):
                return False
        return tickets.done == done

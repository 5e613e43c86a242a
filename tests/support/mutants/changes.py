"""What can be left out of a program's waits, or done in the wrong place: every single one, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from planner.schedule.compile import Op, Program, Queue

STREAMS = (Queue.COMPUTE, Queue.H2D, Queue.D2H)


class Change(StrEnum):
    """Of a wait, or of the event that waits are for."""

    NO_WAIT = "wait taken out"
    NO_EVENT = "event not waited for"
    NO_TICKET = "ticket not waited for"
    EVENT_ELSEWHERE = "event waited for on another stream"
    NO_RECORD = "event not recorded"
    RECORD_ELSEWHERE = "event recorded on another stream"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`op` does not wait for `on` as it should; where the event of `on` is at fault, all that wait for it do not, of
    which `op` is one. `stream`: the other one."""

    change: Change
    op: str
    on: str
    stream: Queue | None = None

    def __str__(self) -> str:
        return f"{self.change}{f' ({self.stream})' if self.stream else ''}: {self.op} after {self.on}"


def mutants(program: Program) -> Iterator[Mutant]:
    """All of a program's."""
    by_name = {op.name: op for op in program.ops}
    first: dict[str, Op] = {}
    for op in program.ops:
        for name in op.waits:
            first.setdefault(name, op)
            yield from _of_a_wait(op, by_name[name])
    for name, op in first.items():
        yield from _of_an_event(op, by_name[name])


def _of_a_wait(op: Op, on: Op) -> Iterator[Mutant]:
    yield Mutant(Change.NO_WAIT, op.name, on.name)
    if on.queue not in STREAMS:
        return  # there is a ticket, and no event
    if on.queue is not Queue.COMPUTE:  # else there is no ticket
        yield Mutant(Change.NO_EVENT, op.name, on.name)
        yield Mutant(Change.NO_TICKET, op.name, on.name)
    others = (queue for queue in STREAMS if queue not in (op.queue, on.queue))
    yield from (Mutant(Change.EVENT_ELSEWHERE, op.name, on.name, queue) for queue in others)


def _of_an_event(op: Op, on: Op) -> Iterator[Mutant]:
    if on.queue in STREAMS:
        yield Mutant(Change.NO_RECORD, op.name, on.name)
        others = (queue for queue in STREAMS if queue is not on.queue)
        yield from (Mutant(Change.RECORD_ELSEWHERE, op.name, on.name, queue) for queue in others)

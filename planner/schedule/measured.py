"""When the operations of two steps ran, of a real run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from planner.schedule.compile import OpKind, Program, Queue

TIMELINE = "timeline.json"
"""Beside a plan.json, of its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """`first_step`: the number of the first of the two, from 1. `program`: `digest` of what ran. Begin and end of each
    operation, in the program's order, a row for each step: whole nanoseconds from the moment at which the first one
    began to compute; both 0 for an operation that did not run in the step, or of which it is not known. `paused`: a
    checkpoint or an evaluation came between the two, which has no time here."""

    first_step: int
    program: str
    start_ns: tuple[tuple[int, ...], ...]
    end_ns: tuple[tuple[int, ...], ...]
    paused: bool = False

    def step_ns(self, program: Program) -> int:
        """From where the first step begins to compute to where the second one does."""
        first, second = (_begin_ns(program, row) for row in self.start_ns)
        return second - first

    def is_of(self, program: Program) -> bool:
        """Whether that is what ran."""
        return self.program == digest(program) and all(len(row) == len(program.ops) for row in self.start_ns)


def digest(program: Program) -> str:
    """Of a program's operations and their order."""
    return hashlib.sha256("\n".join(op.name for op in program.ops).encode()).hexdigest()


def _begin_ns(program: Program, starts_ns: tuple[int, ...]) -> int:
    return next(at for op, at in zip(program.ops, starts_ns, strict=True) if op.kind is OpKind.RUN)


def measured(
    program: Program, first_step: int, spans: dict[tuple[int, int], tuple[int, int]], *, paused: bool = False
) -> Measured:
    """Of `spans`, begin and end in nanoseconds of any clock by (number of the step, place in the program). Raises
    ValueError where a turn of one of the two steps is not there."""
    turns = [(n, op) for n, op in enumerate(program.ops) if op.queue is Queue.COMPUTE and op.kind is OpKind.RUN]
    steps = first_step, first_step + 1
    if missing := [op.name for step in steps for n, op in turns if (step, n) not in spans]:
        raise ValueError(f"not known of {len(missing)} turns, {missing[0]}")
    zero = spans[first_step, turns[0][0]][0]
    rows = [[spans.get((step, n), (zero, zero)) for n in range(len(program.ops))] for step in steps]
    return Measured(
        first_step=first_step, program=digest(program), paused=paused,
        start_ns=tuple(tuple(start - zero for start, _ in row) for row in rows),
        end_ns=tuple(tuple(end - zero for _, end in row) for row in rows),
    )  # fmt: skip

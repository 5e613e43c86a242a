"""Stores the times at which the operations of two steps of a real run began and ended."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from planner.schedule.compile import OpKind, Program, Queue

TIMELINE = "timeline.json"
"""The name of the file with these times, beside the run's plan.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The times of all operations in two consecutive steps. `first_step`: the number of the first one, counted from 1.
    `program`: the `digest` of the program that ran. `start_ns`, `end_ns`: [steps, operations] in program order, whole
    nanoseconds from the moment at which the first step began to compute; both are 0 for an operation that did not run
    in the step, or whose times are not known. `paused`: a checkpoint or an evaluation came between the two steps."""

    first_step: int
    program: str
    start_ns: tuple[tuple[int, ...], ...]
    end_ns: tuple[tuple[int, ...], ...]
    paused: bool = False

    def step_ns(self, program: Program) -> int:
        """Nanoseconds from the first step's first computation to the second step's."""
        first, second = (_begin_ns(program, row) for row in self.start_ns)
        return second - first

    def is_of(self, program: Program) -> bool:
        """Whether `program` is the program whose times these are."""
        return self.program == digest(program) and all(len(row) == len(program.ops) for row in self.start_ns)


def digest(program: Program) -> str:
    """A SHA-256 in hexadecimal of a program's operations in their order."""
    return hashlib.sha256("\n".join(op.name for op in program.ops).encode()).hexdigest()


def _begin_ns(program: Program, starts_ns: tuple[int, ...]) -> int:
    return next(at for op, at in zip(program.ops, starts_ns, strict=True) if op.kind is OpKind.RUN)


def measured(
    program: Program, first_step: int, spans: dict[tuple[int, int], tuple[int, int]], *, paused: bool = False
) -> Measured:
    """The `Measured` times of step `first_step` and the next step. `spans`: maps (number of the step, index of the
    operation in the program) to its begin and end, in nanoseconds of any one clock. Raises ValueError if the times of a
    block's run are missing."""
    turns = [(n, op) for n, op in enumerate(program.ops) if op.queue is Queue.COMPUTE and op.kind is OpKind.RUN]
    steps = first_step, first_step + 1
    if missing := [op.name for step in steps for n, op in turns if (step, n) not in spans]:
        raise ValueError(f"not known of {len(missing)} turns, {missing[0]}")
    zero = spans[first_step, turns[0][0]][0]
    rows = [[spans.get((step, n), (zero, zero)) for n in range(len(program.ops))] for step in steps]
    return Measured(
        first_step=first_step,
        program=digest(program),
        paused=paused,
        start_ns=tuple(tuple(start - zero for start, _ in row) for row in rows),
        end_ns=tuple(tuple(end - zero for _, end in row) for row in rows),
    )

"""Records when the operations of a few steps run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from planner.schedule.compile import Op, Program
from planner.schedule.measured import Measured, measured

STEPS = 3  # recorded to measure two: updates that these leave to the next step belong to them


class Recording:
    """A recording of the steps that begin from now on. A mark is a moment; `ns_of` gives its time, once nothing runs
    any more, in nanoseconds of `time.perf_counter_ns`."""

    def __init__(self, program: Program, ns_of: Callable[[Any], int] = int) -> None:
        self._program, self._ns_of = program, ns_of
        self._places = {id(op): n for n, op in enumerate(program.ops)}
        self._steps: list[int] = []
        self._found: list[tuple[int, int, Any, Any]] = []
        self._turns: dict[int, Any] = {}
        self._drained_ns: int | None = None  # when nothing ran any more; None if a step has begun since
        self._pauses: list[tuple[int, int, int]] = []  # steps begun before it, its begin and its end

    def begin_step(self, number: int) -> None:
        """Step `number`, from 1, begins."""
        if self._drained_ns is not None and self._steps:
            self._pauses.append((len(self._steps), self._drained_ns, now()))
        self._drained_ns = None
        self._steps.append(number)

    def drained(self) -> None:
        """Nothing runs any more. The time from now until the next step begins belongs to no step and is left out."""
        if self._drained_ns is None:
            self._drained_ns = now()

    def add(self, op: Op, number: int, begin: Any, end: Any) -> None:
        """`op` ran with the values of step `number`; a carried operation belongs to the step in which it runs."""
        self._found.append((number + op.carried, self._places[id(op)], begin, end))

    def begin_turn(self, op: Op, mark: Any) -> None:
        """The turn `op` of the present step computes from now on."""
        self._turns[id(op)] = mark

    def end_turn(self, op: Op, mark: Any) -> None:
        """The turn `op` has computed."""
        begin = self._turns.pop(id(op), None)
        if begin is not None and self._steps:
            self._found.append((self._steps[-1], self._places[id(op)], begin, mark))

    @property
    def is_full(self) -> bool:
        """Whether all steps have begun."""
        return len(self._steps) >= STEPS

    @property
    def is_paused(self) -> bool:
        """Whether nothing ran for a while between the two steps."""
        ended = self._drained_ns is not None and len(self._steps) == 1
        return ended or any(begun == 1 for begun, _, _ in self._pauses)

    def measured(self) -> Measured:
        """The times of the first two steps. Nothing may be running. Raises ValueError where they were not whole."""
        spans = {(step, place): (self._clock(begin), self._clock(end)) for step, place, begin, end in self._found}
        return measured(self._program, self._steps[0], spans, paused=self.is_paused)

    def _clock(self, mark: Any) -> int:
        """The time of a mark, in nanoseconds, less the pauses before it."""
        ns = self._ns_of(mark)
        return ns - sum(max(0, min(ns, end) - begin) for _, begin, end in self._pauses)


def now() -> int:
    """A mark of the host."""
    return time.perf_counter_ns()

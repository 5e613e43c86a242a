"""Notes when the operations of a few steps run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from planner.schedule.compile import Op, Program
from planner.schedule.measured import Measured, measured

STEPS = 3  # that are noted for two: what they leave to the next one belongs to them


class Recording:
    """Of the steps that begin from now on. A mark is a moment: `ns_of` says which, once nothing runs any more, in
    nanoseconds of `time.perf_counter_ns`."""

    def __init__(self, program: Program, ns_of: Callable[[Any], int] = int) -> None:
        self._program, self._ns_of = program, ns_of
        self._places = {id(op): n for n, op in enumerate(program.ops)}
        self._steps: list[int] = []
        self._found: list[tuple[int, int, Any, Any]] = []
        self._turns: dict[int, Any] = {}
        self._drained_ns: int | None = None  # when nothing ran any more, where no step has begun since
        self._pauses: list[tuple[int, int, int]] = []  # steps begun before it, and from when to when

    def begin_step(self, number: int) -> None:
        """Step `number`, from 1, begins."""
        if self._drained_ns is not None and self._steps:
            self._pauses.append((len(self._steps), self._drained_ns, now()))
        self._drained_ns = None
        self._steps.append(number)

    def drained(self) -> None:
        """Nothing runs any more. What comes now, until the next step begins, is no step's: time stands still."""
        if self._drained_ns is None:
            self._drained_ns = now()

    def add(self, op: Op, number: int, begin: Any, end: Any) -> None:
        """`op` ran with the values of step `number`; what is carried belongs to the step in which it runs."""
        self._found.append((number + op.carried, self._places[id(op)], begin, end))

    def begin_turn(self, op: Op, mark: Any) -> None:
        """The turn `op` of the present step computes from now on."""
        self._turns[id(op)] = mark

    def end_turn(self, op: Op, mark: Any) -> None:
        """It has computed."""
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
        """What the first two steps did; nothing may be running. Raises ValueError where they were not whole."""
        spans = {(step, place): (self._clock(begin), self._clock(end)) for step, place, begin, end in self._found}
        return measured(self._program, self._steps[0], spans, paused=self.is_paused)

    def _clock(self, mark: Any) -> int:
        """Of a mark, without the pauses before."""
        ns = self._ns_of(mark)
        return ns - sum(max(0, min(ns, end) - begin) for _, begin, end in self._pauses)


def now() -> int:
    """A mark of the host."""
    return time.perf_counter_ns()

"""Records when the operations of a few steps run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from planner.schedule.compile import Op, Program
from planner.schedule.measured import Measured, measured

STEPS = 3  # recorded to measure two: updates that these leave to the next step belong to them


class Recording:
    """Collects the times at which the operations of a few steps run, beginning with the next step. Times come as marks:
    a host time, or a CUDA event. `ns_of` turns a mark into nanoseconds of `time.perf_counter_ns`, once nothing runs any
    more."""

    def __init__(self, program: Program, ns_of: Callable[[Any], int] = int) -> None:
        self._program, self._ns_of = program, ns_of
        self._places = {id(op): n for n, op in enumerate(program.ops)}
        self._steps: list[int] = []
        self._found: list[tuple[int, int, Any, Any]] = []
        self._turns: dict[int, Any] = {}
        self._drained_ns: int | None = None  # when nothing ran any more; None if a step has begun since
        self._pauses: list[tuple[int, int, int]] = []  # steps begun before it, its begin and its end

    def begin_step(self, number: int) -> None:
        """Note that step `number`, counted from 1, begins."""
        if self._drained_ns is not None and self._steps:
            self._pauses.append((len(self._steps), self._drained_ns, now()))
        self._drained_ns = None
        self._steps.append(number)

    def drained(self) -> None:
        """Note that nothing runs any more. The time from now until the next step begins belongs to no step."""
        if self._drained_ns is None:
            self._drained_ns = now()

    def add(self, op: Op, number: int, begin: Any, end: Any) -> None:
        """Note that `op` ran from mark `begin` to mark `end`, with the values of step `number`. An update carried into
        the next step counts for the step in which it runs."""
        self._found.append((number + op.carried, self._places[id(op)], begin, end))

    def begin_turn(self, op: Op, mark: Any) -> None:
        """Note that `op`, one block's computation on one slice, computes from `mark` on."""
        self._turns[id(op)] = mark

    def end_turn(self, op: Op, mark: Any) -> None:
        """Note that `op`, one block's computation on one slice, was computed at `mark`."""
        begin = self._turns.pop(id(op), None)
        if begin is not None and self._steps:
            self._found.append((self._steps[-1], self._places[id(op)], begin, mark))

    @property
    def is_full(self) -> bool:
        """Whether all the steps to be recorded have begun, and the one after them."""
        return len(self._steps) >= STEPS

    @property
    def is_paused(self) -> bool:
        """Whether nothing ran for a while between the two steps, as during a checkpoint."""
        ended = self._drained_ns is not None and len(self._steps) == 1
        return ended or any(begun == 1 for begun, _, _ in self._pauses)

    def measured(self) -> Measured:
        """The times of the first two steps. Call it when nothing runs any more. Raises ValueError where a step was not
        recorded whole."""
        spans = {(step, place): (self._clock(begin), self._clock(end)) for step, place, begin, end in self._found}
        return measured(self._program, self._steps[0], spans, paused=self.is_paused)

    def _clock(self, mark: Any) -> int:
        """The time of a mark, in nanoseconds, less the pauses before it."""
        ns = self._ns_of(mark)
        return ns - sum(max(0, min(ns, end) - begin) for _, begin, end in self._pauses)


def now() -> int:
    """The present time on the host, in nanoseconds of `time.perf_counter_ns`, as a mark of a `Recording`."""
    return time.perf_counter_ns()

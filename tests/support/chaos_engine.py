"""The queues of the real engine in one thread, in a random order that the program's waits allow."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import torch

from planner.schedule.compile import Op, OpKind, Program, Queue
from worker.engine.actions import Actions
from worker.runtime.interpreter import Interpreter, Together
from worker.runtime.step_values import StepValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """What an order prefers. `eager`: by queue, the chance that one more copy or update runs while nobody waits for it;
    with 0 a queue runs when nothing else does."""

    seed: int
    eager: dict[Queue, float]

    @classmethod
    def drawn(cls, seed: int) -> Mood:
        """Queues of random haste, now and then of none, or of no patience."""
        chance = random.Random(seed)
        return cls(seed=seed, eager={queue: chance.choice((0.0, 0.3, 0.7, 1.0)) for queue in Queue})


class ChaosInterpreter(Interpreter):
    """An interpreter with no thread of its own. What is allocated and what is released is NaN."""

    waited_s = 0.0
    recording = None

    def __init__(self, program: Program, actions: Actions, mood: Mood) -> None:
        self.log: list[Op] = []
        self._actions, self._eager, self._chance = actions, mood.eager, random.Random(mood.seed)
        self._program = program  # keeps the operations alive, whose ids are keys here
        by_name = {op.name: op for op in program.ops}
        self._waits = {id(op): [by_name[name] for name in op.waits] for op in program.ops}
        self._pending: dict[Queue, deque[tuple[Op, StepValues | None, dict[Queue, int]]]] = {q: deque() for q in Queue}
        self._issued, self._done = dict.fromkeys(Queue, 0), dict.fromkeys(Queue, 0)
        self._latest: dict[int, int] = {}

    def issue(self, ops: Together, values: StepValues | None) -> None:
        """Do what computes, after what it waits for; put off anything else. Without values only its place is taken.
        Here each operation goes by itself."""
        for op in ops:
            self._issue(op, values)

    def _issue(self, op: Op, values: StepValues | None) -> None:
        if op.queue is Queue.COMPUTE:
            self.wait(op)
            self._perform(op, values)
            return
        self._pending[op.queue].append((op, values, self._needs(op)))
        self._issued[op.queue] += 1
        self._latest[id(op)] = self._issued[op.queue]

    def wait(self, op: Op) -> None:
        """Run queues, the hasty ones more often, until what `op` waits for is done, and then as long as they like."""
        needs = self._needs(op)
        while any(self._done[queue] < number for queue, number in needs.items()):
            ready = self._ready()
            self._run_one(self._chance.choices(ready, [self._eager[queue] + 1e-9 for queue in ready])[0])
        self.flush()

    def done(self, op: Op) -> None:
        """Nothing waits for a turn but by the order of issue."""

    def flush(self) -> None:
        """Run what queues are eager for."""
        while eager := [queue for queue in self._ready() if self._chance.random() < self._eager[queue]]:
            self._run_one(self._chance.choice(eager))

    def drain(self) -> None:
        """Run all of it."""
        while ready := self._ready():
            self._run_one(self._chance.choice(ready))
        assert self._done == self._issued

    def close(self) -> None:
        """Nothing to end."""

    def _needs(self, op: Op) -> dict[Queue, int]:
        others = [other for other in self._waits[id(op)] if id(other) in self._latest]
        return {other.queue: self._latest[id(other)] for other in others}

    def _ready(self) -> list[Queue]:
        return [queue for queue, pending in self._pending.items() if pending and self._is_ready(pending[0][2])]

    def _is_ready(self, needs: dict[Queue, int]) -> bool:
        return all(self._done[queue] >= number for queue, number in needs.items())

    def _run_one(self, queue: Queue) -> None:
        op, values, _ = self._pending[queue].popleft()
        self._perform(op, values)
        self._done[queue] += 1

    @torch.no_grad()
    def _perform(self, op: Op, values: StepValues | None) -> None:
        if values is None:
            return
        items = self._actions._device.items
        if op.kind is OpKind.FREE:
            _poison(items[op.subject])
        self._actions.perform((op,), values)
        if op.kind is OpKind.ALLOC:
            _poison(items[op.subject])
        self.log.append(op)


def _poison(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

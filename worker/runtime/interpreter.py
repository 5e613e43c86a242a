"""Defines the interface of the queues that the engine uses, and the cursor that walks through a program and issues its
operations to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.out_of_memory import is_out_of_memory
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.plan import Direction
from worker.runtime.recording import Recording
from worker.runtime.step_values import StepValues

Together = tuple[Op, ...]
"""Operations that are issued as one: see `together`."""

Perform = Callable[[Together, StepValues], None]
"""A function that does operations that are issued as one, or launches them on the current CUDA stream. The caller has
switched autograd off."""


class Performer(Protocol):
    """Does the work of a program's operations, apart from RUN, the computation of a block."""

    def perform(self, ops: Together, values: StepValues) -> None:
        """Do `ops`, operations that are issued as one, or launch them on the current CUDA stream. `values`: what
        updates of this step read. The caller has switched autograd off."""

    def only_copies(self, op: Op) -> bool:
        """Whether `op`, when done now, only copies between the device and host memory that the device can access
        directly."""


class Interpreter(Protocol):
    """Runs a program's operations on queues. Only the thread that has the right to compute calls its methods.

    waited_s    seconds that computation has waited for other queues
    recording   the recording of when operations run; None when nothing is recorded
    """

    waited_s: float
    recording: Recording | None

    @property
    def error(self) -> BaseException | None:
        """The first error that an operation on a queue raised; None without one. After it, operations of its step and
        of later steps are skipped."""

    def record(self) -> None:
        """Start recording when operations run. Must be called between two steps."""

    def issue(self, ops: Together, values: StepValues | None) -> None:
        """Do `ops` now if they belong to the computing queue, after all that they wait for; else hand them to their
        queue. With `values` None they do no work, but keep their place in the order: they wait for others, and others
        wait for them."""

    def wait(self, op: Op) -> None:
        """Return when the turn `op` (one block's computation on one slice) may begin, because all that it waits for is
        done or, on CUDA, ahead of it on its stream. Raises the first error of a queue."""

    def done(self, op: Op) -> None:
        """Note that the turn `op` (one block's computation on one slice) has computed, so that operations that wait for
        it may run."""

    def flush(self) -> None:
        """Hand over to the queues' threads what was issued since the last call. Raises the first error of a queue."""

    def drain(self) -> None:
        """Wait until every queue has done all that was issued. Raises the first error of a queue."""

    def close(self) -> None:
        """End the queues' threads. Operations that they have not begun are never done."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A RUN operation, taken apart: one block's forward or backward on one slice (micro-batch)."""

    op: Op
    direction: Direction
    block: int
    slice: int

    def __str__(self) -> str:
        return self.op.subject


class Cursor:
    """The place in the program during a step: the turn (one block's computation on one slice) that computes now or
    comes next. The operations between two turns are issued when the slice has finished the first turn, including the
    model's own operations after that block.

    Two operations on one copy may be ordered only by a third one between them. So an operation that has nothing to do
    in a step or a drain keeps its place: the order is that of a whole step, which is proven."""

    def __init__(
        self, program: Program, interpreter: Interpreter, expect: Callable[[Together], None] = lambda ops: None
    ) -> None:
        """`expect` is told which operations compute or allocate from now on, if any."""
        self._interpreter, self._expect = interpreter, expect
        self._ops = tuple(together(program))
        self._legs = tuple(_legs(self._ops))
        self._at = 0
        self._values: StepValues | None = None
        self._previous: StepValues | None = None
        self._carries = any(op.carried for op in program.ops)
        self._issued = 0  # how many of the step's `_ops` were issued, finished turns included
        self._unsure = False  # whether the one after these may have been issued

    @property
    def turn(self) -> Turn | None:
        """The turn (one block's computation on one slice) that computes now or comes next; None between steps and after
        a step's last turn."""
        return self._legs[self._at][1]

    def begin(self, values: StepValues) -> None:
        """Start a step: issue the operations that come before its first turn (a block's computation on a slice).
        `values`: what the step's updates read."""
        self._at, self._issued, self._values = 0, 0, values
        self._issue()

    def start_turn(self) -> Turn:
        """Wait until the next turn (a block's computation on a slice) may begin, and return it."""
        turn = self.turn
        assert turn is not None
        self._interpreter.wait(turn.op)
        return turn

    def end_turn(self) -> None:
        """End the present turn (a block's computation on a slice): issue the operations up to the next turn."""
        turn = self.turn
        assert turn is not None
        self._interpreter.done(turn.op)
        self._at, self._issued = self._at + 1, self._issued + 1
        self._issue()

    def end(self) -> None:
        """End the step. Its carried updates, CPU updates that may overlap the next step's forward, are done in the next
        step or by a drain."""
        self._previous = self._values

    def take_back(self) -> bool:
        """Clean up after an error in a step: finish what was issued, and do the updates that the step before left to
        this one. Returns True if none of this step's own updates has begun, so that the weights are those before the
        step. Raises the first error of a queue."""
        if self._unsure or self._values is None:
            return False
        self._carry_out(self._ops[self._issued :])
        self._interpreter.drain()
        return not self._values.updating

    def run_carried(self) -> None:
        """Issue the carried updates, those that the last step left to the next one. The next step then leaves them
        out."""
        self._carry_out(self._ops)
        self._interpreter.flush()
        self.forget()

    def _carry_out(self, ops: Sequence[Together]) -> None:
        """Of `ops` do the updates that the step before left to this one; the others only keep their place."""
        if self._carries and self._previous is not None:
            with torch.no_grad():
                for its in ops:
                    self._interpreter.issue(its, self._previous if its[0].carried else None)

    def forget(self) -> None:
        """Make the next step begin without carried updates, the updates that a step leaves to the next one."""
        self._at, self._previous = len(self._legs) - 1, None

    def let_go(self) -> None:
        """Drop the references to the values of past steps. The cursor is not used after this."""
        self._values = self._previous = None

    def _issue(self) -> None:
        assert self._values is not None
        self._unsure = True  # an interrupt may come anywhere
        try:
            with torch.no_grad():
                for ops, carried, computes in self._legs[self._at][0]:
                    values = self._previous if carried else self._values
                    if computes and values is not None:
                        self._expect(ops)
                    self._interpreter.issue(ops, values)
                    self._issued += 1
            self._interpreter.flush()
            self._expect((self.turn.op,) if self.turn else ())
        except BaseException as error:
            # An allocation failed, or a queue's error was raised before the operation: the operation has done nothing,
            # or only what is freed again.
            self._unsure = error is not self._interpreter.error and not is_out_of_memory(error)
            raise
        self._unsure = False


def name_of(ops: Together) -> str:
    """The name under which operations that are issued as one appear in a profile: "fetch@F3:w:l2.up" for one operation,
    "fetch@F3:w:l2.up +8" for nine."""
    return ops[0].name if len(ops) == 1 else f"{ops[0].name} +{len(ops) - 1}"


_GOES_WITH_OTHERS = frozenset({OpKind.ALLOC, OpKind.FREE, OpKind.FETCH, OpKind.SEND})


def together(program: Program) -> Iterator[Together]:
    """Yield the program's operations in order, as tuples of neighbours that can be issued as one: they are of one kind,
    only the first waits for others, and only the last is waited for. So no operation runs later than if it were issued
    alone."""
    awaited = {name for op in program.ops for name in op.waits}
    ops: list[Op] = []
    for op in program.ops:
        if ops and (op.waits or not _go_together(ops[-1], op) or ops[-1].name in awaited):
            yield tuple(ops)
            ops = []
        ops.append(op)
    if ops:
        yield tuple(ops)


def _go_together(one: Op, other: Op) -> bool:
    """Whether neighbours can be issued as one. Operations with a slot, or on activations (several tensors), cannot."""
    return one.kind is other.kind and all(
        op.kind in _GOES_WITH_OTHERS and op.slot is None and not op.moves_activations for op in (one, other)
    )


def _legs(ops: Sequence[Together]) -> Iterator[tuple[tuple[tuple[Together, bool, bool], ...], Turn | None]]:
    """The operations, cut at the turns: those before each turn, each with whether it is carried and whether it computes
    or allocates, and the turn. At the end come those after the last turn, with None."""
    before: list[tuple[Together, bool, bool]] = []
    for its in ops:
        first = its[0]
        if first.kind is OpKind.RUN:
            yield tuple(before), Turn(first, *first.turn)
            before = []
        else:
            computes = first.queue is Queue.COMPUTE and first.kind is not OpKind.FREE
            before.append((its, first.carried, computes))
    yield tuple(before), None

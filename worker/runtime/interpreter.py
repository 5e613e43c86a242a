"""Defines what the engine asks of the queues, and the cursor that walks a program over them."""

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
"""Does operations that go together, or issues them to a stream. The caller has switched autograd off."""


class Performer(Protocol):
    """Does the operations of a program."""

    def perform(self, ops: Together, values: StepValues) -> None:
        """See `Perform`."""

    def only_copies(self, op: Op) -> bool:
        """Whether `op` is now only a copy between the device and host memory that the device reaches by itself."""


class Interpreter(Protocol):
    """Runs operations on queues. Methods are called by the one thread that has the right to compute.

    waited_s    seconds that it has waited for other queues
    recording   the recording of when operations run; None when nothing is recorded
    """

    waited_s: float
    recording: Recording | None

    @property
    def error(self) -> BaseException | None:
        """The first error on a queue. Operations of its step and of later ones are no longer done."""

    def record(self) -> None:
        """Record from now on when operations run. No step may be running."""

    def issue(self, ops: Together, values: StepValues | None) -> None:
        """Do operations of the computing queue after what they wait for; hand others to their queue. Without values
        they are not done, but keep their place: they wait, and are waited for, as always."""

    def wait(self, op: Op) -> None:
        """Return when the turn `op` may compute. Raises what went wrong on a queue."""

    def done(self, op: Op) -> None:
        """The turn `op` has computed."""

    def flush(self) -> None:
        """Let the queues see what was issued. Raises what went wrong on a queue."""

    def drain(self) -> None:
        """Return when every queue is empty. Raises what went wrong on a queue."""

    def close(self) -> None:
        """End the queues' threads; what they have not begun is left undone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A RUN operation, parsed."""

    op: Op
    direction: Direction
    block: int
    slice: int

    def __str__(self) -> str:
        return self.op.subject


class Cursor:
    """The place in the program: the turn that comes next or is computing. The operations between two turns are issued
    when the first turn's slice is done with it, the frame's operations after its block included.

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
        """The next or computing turn; None when no step runs, and after a step's last turn."""
        return self._legs[self._at][1]

    def begin(self, values: StepValues) -> None:
        """Start a step: issue the operations before its first turn."""
        self._at, self._issued, self._values = 0, 0, values
        self._issue()

    def start_turn(self) -> Turn:
        """Wait for what the turn needs."""
        turn = self.turn
        assert turn is not None
        self._interpreter.wait(turn.op)
        return turn

    def end_turn(self) -> None:
        """The turn is over: issue the operations up to the next one."""
        turn = self.turn
        assert turn is not None
        self._interpreter.done(turn.op)
        self._at, self._issued = self._at + 1, self._issued + 1
        self._issue()

    def end(self) -> None:
        """The step is over: its carried updates are done in the next step, or by a drain."""
        self._previous = self._values

    def take_back(self) -> bool:
        """After an error in a step: finish what was issued, and do the updates that the step before left to this one.
        Returns whether the weights are then those before the step, as none of its own updates has begun. Raises what
        went wrong on a queue."""
        if self._unsure or self._values is None:
            return False
        self._carry_out(self._ops[self._issued :])
        self._interpreter.drain()
        return not self._values.updating

    def run_carried(self) -> None:
        """Issue the updates that the last step left to the next one, which then leaves them out."""
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
        """The next step begins from the drained state: nothing is carried into it."""
        self._at, self._previous = len(self._legs) - 1, None

    def let_go(self) -> None:
        """Drop the values of the steps, for good."""
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
    """ "fetch@F3:w:l2.up" of one, "fetch@F3:w:l2.up +8" of nine."""
    return ops[0].name if len(ops) == 1 else f"{ops[0].name} +{len(ops) - 1}"


_GOES_WITH_OTHERS = frozenset({OpKind.ALLOC, OpKind.FREE, OpKind.FETCH, OpKind.SEND})


def together(program: Program) -> Iterator[Together]:
    """The program's operations, with neighbours joined that can be issued as one: they are of one kind, only the first
    waits for others, and only the last is waited for. So no operation comes later than it would one by one."""
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

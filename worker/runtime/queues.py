"""Runs queues as threads: each runs its operations in the program's order, each operation after what it waits for."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

from planner.schedule.compile import Op, Program, Queue
from worker.runtime.interpreter import Together, name_of
from worker.runtime.recording import Recording
from worker.runtime.step_values import StepValues


class Tickets:
    """Counts how many operations each queue has done. A queue does its operations in order, so one number per queue
    says which of them are done."""

    def __init__(self) -> None:
        self.issued = dict.fromkeys(Queue, 0)
        self.done = dict.fromkeys(Queue, 0)
        self.error: BaseException | None = None
        self.closed = False
        self._failed_step = 0
        self._changed = threading.Condition()
        self._wanted: tuple[tuple[Queue, int], ...] = ()  # what is waited for

    def advance(self, queue: Queue) -> None:
        """Count the next operation of `queue` as done. Only the thread that does the queue's operations calls this."""
        self.done[queue] = done = self.done[queue] + 1
        for other, number in self._wanted:  # a waiter adds itself before it looks at `done`
            if other is queue and number <= done:
                with self._changed:
                    self._changed.notify_all()
                return

    def wait(self, queue: Queue, number: int) -> None:
        """Wait until operation number `number` of `queue` is done, or until `close`."""
        if self.done[queue] < number:
            mine = queue, number
            with self._changed:
                self._wanted = (*self._wanted, mine)
                try:
                    self._changed.wait_for(lambda: self.done[queue] >= number or self.closed)
                finally:
                    at = self._wanted.index(mine)
                    self._wanted = self._wanted[:at] + self._wanted[at + 1 :]

    def fail(self, error: BaseException, step: int) -> None:
        """Keep `error`, met in an operation of step number `step`, if it is the first. From now on operations of that
        step and later ones are counted but not done. Those of earlier steps are still done, as none of them waits for a
        later step."""
        with self._changed:
            if self.error is None:
                self.error, self._failed_step = error, step

    def is_wanted(self, step: int) -> bool:
        """Whether operations of step number `step` are still to be done: False from the step of an error on."""
        return not self.closed and (self.error is None or step < self._failed_step)

    def close(self) -> None:
        """End all waiting: `wait` returns at once from now on."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def check(self, values: StepValues | None = None) -> None:
        """Raise the first error of a queue, if there is one. With `values`, raise it only if it stops the step that
        these values belong to."""
        if self.error is not None and (values is None or values.number >= self._failed_step):
            raise self.error


Numbers = tuple[tuple[Queue, int], ...]
Job = tuple[Together, StepValues | None, Numbers]  # names no tensor: it must not keep device bytes alive


class _QueueThread:
    """The thread that does the operations of one queue, in order."""

    def __init__(
        self,
        queue: Queue,
        tickets: Tickets,
        setup: Callable[[Queue], None],
        run: Callable[[Together, StepValues | None], None],
    ) -> None:
        self._queue, self._tickets, self._setup, self._do = queue, tickets, setup, run
        self._pending: list[Job] = []
        self._batches: SimpleQueue[list[Job] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"offmate-{queue}", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Add operations to those that the next `flush` hands to the thread."""
        self._pending.append(job)

    def flush(self) -> None:
        """Hand the added operations to the thread, all together, because handing over costs more than a small copy."""
        if self._pending:
            self._batches.put(self._pending)
            self._pending = []

    def close(self) -> None:
        """End the thread; operations that it has not begun are never done."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._setup(self._queue)
        except BaseException as error:
            self._tickets.fail(error, 0)
        while (batch := self._batches.get()) is not None:
            for job in batch:
                self._run_job(*job)

    def _run_job(self, ops: Together, values: StepValues | None, numbers: Numbers) -> None:
        for queue, number in numbers:
            self._tickets.wait(queue, number)
        self.run(ops, values, self._do)

    def run(self, ops: Together, values: StepValues | None, do: Callable[[Together, StepValues | None], None]) -> None:
        """Do the queue's next operations in the calling thread by `do`, unless an error has stopped their step, and
        note them as done."""
        step = 0 if values is None else values.number
        if self._tickets.is_wanted(step):
            try:
                do(ops, values)
            except BaseException as error:
                error.add_note(f"in {name_of(ops)} on the {self._queue} queue")
                self._tickets.fail(error, step)
        self._tickets.advance(self._queue)


class QueueInterpreter(ABC):
    """Base class of interpreters: computes in the calling thread, with a thread for each other queue. A subclass
    defines `run`, and so what an operation's ticket means to those that wait for it: that it is done, or that its CUDA
    stream has it.

    waited_s    seconds that the computing thread has waited for other queues
    """

    def __init__(self, program: Program) -> None:
        self.waited_s = 0.0
        self.recording: Recording | None = None
        self._tickets = Tickets()
        self._program = program  # keeps operations alive, whose ids are keys here; a name is built at each call
        by_name = {op.name: op for op in program.ops}
        self.waits = {id(op): tuple(by_name[name] for name in op.waits) for op in program.ops}
        # The computing thread issues everything in serial order: its own operations need no ticket.
        self._hosts = {
            key: tuple((other.queue, id(other)) for other in others if other.queue is not Queue.COMPUTE)
            for key, others in self.waits.items()
        }
        self._latest: dict[int, int] = {}
        used = {op.queue for op in program.ops} | {Queue.H2D, Queue.D2H, Queue.CPU}  # few plans use disks
        others = (queue for queue in Queue if queue is not Queue.COMPUTE and queue in used)
        self._queues: dict[Queue, _QueueThread] = {
            queue: _QueueThread(queue, self._tickets, self.setup, self.run) for queue in others
        }
        # Looked up once for each operation that is issued.
        self._ways = {id(op): (op.queue, self._queues.get(op.queue), bool(self._hosts[id(op)])) for op in program.ops}

    def record(self) -> None:
        """Start recording when operations run. Must be called between two steps."""
        self.recording = Recording(self._program)

    @abstractmethod
    def setup(self, queue: Queue) -> None:
        """Prepare the new thread of `queue`: set what PyTorch keeps per thread."""

    @abstractmethod
    def run(self, ops: Together, values: StepValues | None) -> None:
        """Do `ops`, operations of one queue that are issued as one, in the calling thread. All that they wait for has
        its ticket already. With `values` None they do no work."""

    def never_waits(self, op: Op) -> bool:
        """Whether `op`, an operation of another queue, can be done at once in the computing thread, because all that it
        waits for has its ticket and doing it takes no longer than handing it over."""
        return False

    def run_here(self, ops: Together, values: StepValues | None) -> None:
        """Do as `run`, but in the computing thread, for operations for which `never_waits` holds."""
        self.run(ops, values)

    def issue(self, ops: Together, values: StepValues | None) -> None:
        """Do `ops` now if they belong to the computing queue, after all that they wait for; else hand them to their
        queue. With `values` None they do no work, but keep their place in the order.

        Operations for which `never_waits` holds are done here if their queue has nothing left to do: handing them over,
        and switching threads in Python, takes longer than issuing them."""
        first, tickets = ops[0], self._tickets
        queue, thread, waits = self._ways[id(first)]
        if thread is None:
            if waits:
                self._wait(first)
            if values is not None and tickets.error is not None:
                tickets.check(values)
            self.run(ops, values)
            return
        numbers = self._numbers(first) if waits else ()
        before, done = tickets.issued[queue], tickets.done
        self._latest[id(ops[-1])] = tickets.issued[queue] = before + 1
        may_go = done[queue] == before and all(done[other] >= number for other, number in numbers)
        if may_go and all(map(self.never_waits, ops)):
            thread.run(ops, values, self.run_here)
        else:
            thread.add((ops, values, numbers))

    def wait(self, op: Op) -> None:
        """Return when the turn `op` (one block's computation on one slice) may begin. Raises the first error of a
        queue."""
        self._wait(op)
        self._tickets.check()

    def done(self, op: Op) -> None:  # noqa: B027
        """Note that the turn `op` (one block's computation on one slice) has computed. The default does nothing: it
        suits a subclass whose ticket already says so."""

    @property
    def error(self) -> BaseException | None:
        """The first error that an operation on a queue raised; None without one."""
        return self._tickets.error

    def flush(self) -> None:
        """Hand over to the queues' threads what was issued since the last call. Raises the first error of a queue."""
        self._hand_over()
        self._tickets.check()

    def _hand_over(self) -> None:
        for queue in self._queues.values():
            queue.flush()

    def drain(self) -> None:
        """Wait until every queue has done all that was issued. Raises the first error of a queue."""
        self._hand_over()
        for queue in self._queues:
            self._tickets.wait(queue, self._tickets.issued[queue])
        self._tickets.check()

    def close(self) -> None:
        """End the queues' threads. Operations that they have not begun are never done."""
        self._tickets.close()
        for queue in self._queues.values():
            queue.close()

    def _numbers(self, op: Op) -> Numbers:
        """The tickets that `op` waits for: for each operation the last one issued, in this step or the one before."""
        return tuple((queue, self._latest[key]) for queue, key in self._hosts[id(op)] if key in self._latest)

    def _wait(self, op: Op) -> None:
        numbers = self._numbers(op)
        if numbers and any(self._tickets.done[queue] < number for queue, number in numbers):
            self._hand_over()  # what `op` waits for may not be handed over yet
            start = time.perf_counter()
            for queue, number in numbers:
                self._tickets.wait(queue, number)
            self.waited_s += time.perf_counter() - start

"""The CPU as device: copies are real copies, each queue is a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue

import torch
from torch import Tensor

from planner.meter import Meter
from planner.program import Op, Program, Queue
from worker.actions import Actions
from worker.machine import RandomState
from worker.optimizer import StepValues


class CpuMachine:
    """Host and device are both this computer's memory; with `metered`, what counts as device memory is counted."""

    def __init__(self, *, metered: bool) -> None:
        self.device = torch.device("cpu")
        self.meter: Meter | None = Meter() if metered else None

    def computing(self) -> AbstractContextManager[object]:
        """Entered by every thread for the time it computes on the device."""
        return self.meter.watch() if self.meter else contextlib.nullcontext()

    def on_host(self) -> AbstractContextManager[object]:
        """Entered around work on the host in a thread that computes."""
        return self.meter.host() if self.meter else contextlib.nullcontext()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory of exactly that size, contiguous."""
        with self.on_host():
            return self.adopt(torch.empty(tuple(shape), dtype=dtype))

    def adopt(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, from now on host memory."""
        if self.meter:
            with self.meter.host():
                self.meter.add(tensor)
        return tensor

    def place(self, tensor: Tensor, *, copy: bool) -> Tensor:
        """`tensor` as device memory: itself if it fills a storage of its own and is not to be copied."""
        if copy or not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        if self.meter:
            self.meter.add(tensor)
        return tensor

    def seeded(self, seed: int) -> RandomState:
        """The random state that `torch.manual_seed(seed)` sets."""
        return (torch.Generator().manual_seed(seed).get_state(),)

    def random_state(self) -> RandomState:
        """The current state of the generator a model draws from."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: RandomState) -> None:
        """Go on from `state`."""
        torch.set_rng_state(state[0])

    def stop_metering(self) -> None:
        """Count bytes no more."""
        self.meter = None

    def reset_peak(self) -> None:
        """Begin to measure the peak of a step."""
        if self.meter:
            self.meter.reset_peak()

    def peak_bytes(self) -> int | None:
        """The most device bytes since `reset_peak`; None when they are not counted."""
        return self.meter.peak if self.meter else None


class Tickets:
    """How far each queue is. Operations of one queue are done in order, so a number says which are."""

    def __init__(self) -> None:
        self.issued = dict.fromkeys(Queue, 0)
        self.done = dict.fromkeys(Queue, 0)
        self.error: BaseException | None = None
        self.closed = False
        self._changed = threading.Condition()

    def advance(self, queue: Queue) -> None:
        """The next operation of `queue` is done."""
        with self._changed:
            self.done[queue] += 1
            self._changed.notify_all()

    def wait(self, queue: Queue, number: int) -> None:
        """Return when operation `number` of `queue` is done, or nothing more will be."""
        if self.done[queue] < number:
            with self._changed:
                self._changed.wait_for(lambda: self.done[queue] >= number or self.closed)

    def fail(self, error: BaseException) -> None:
        """Keep the first error; from now on queues only count."""
        with self._changed:
            self.error = self.error or error

    def close(self) -> None:
        """Nobody needs to wait any more."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()


Job = tuple[Op, StepValues, tuple[tuple[Queue, int], ...]]  # names no tensor: it must not keep device bytes alive


class QueueThread:
    """Runs the operations of one queue in order, each after what it waits for."""

    def __init__(self, queue: Queue, perform: Callable[[Op, StepValues], None], tickets: Tickets, threads: int) -> None:
        self._queue, self._perform, self._tickets, self._threads = queue, perform, tickets, threads
        self._pending: list[Job] = []
        self._batches: SimpleQueue[list[Job] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"offmate-{queue}", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Take a job; the thread sees it at the next flush."""
        self._pending.append(job)

    def flush(self) -> None:
        """Hand over what was added: one hand-over costs more than a small copy."""
        if self._pending:
            self._batches.put(self._pending)
            self._pending = []

    def close(self) -> None:
        """End the thread."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Both are thread state: a fresh thread records gradients, and has its own pool of threads.
        torch.set_grad_enabled(False)
        torch.set_num_threads(self._threads)
        while (batch := self._batches.get()) is not None:
            for job in batch:
                self._do(*job)
            del batch, job

    def _do(self, op: Op, values: StepValues, waits: tuple[tuple[Queue, int], ...]) -> None:
        for queue, number in waits:
            self._tickets.wait(queue, number)
        if self._tickets.error is None and not self._tickets.closed:
            try:
                self._perform(op, values)
            except BaseException as error:
                error.add_note(f"in {op.name} on the {self._queue} queue")
                self._tickets.fail(error)
        self._tickets.advance(self._queue)


class CpuInterpreter:
    """Computes in the calling thread; one thread per other queue."""

    def __init__(self, program: Program, actions: Actions) -> None:
        self._actions, self._tickets = actions, Tickets()
        threads = torch.get_num_threads()
        self._queues = {
            queue: QueueThread(queue, actions.perform, self._tickets, threads)
            for queue in Queue
            if queue is not Queue.COMPUTE
        }
        self._program = program  # keeps the operations alive, whose ids are keys here: names are built at every call
        by_name = {op.name: op for op in program.ops}
        # What computes is done when the next operation is issued: only copies and CPU updates are waited for.
        waits = {
            op: [o for o in map(by_name.__getitem__, op.waits) if o.queue is not Queue.COMPUTE] for op in program.ops
        }
        self._waits = {id(op): tuple((o.queue, id(o)) for o in others) for op, others in waits.items()}
        self._latest: dict[int, int] = {}

    def issue(self, op: Op, values: StepValues) -> None:
        """Do an operation of the computing queue after what it waits for; hand any other one to its queue."""
        if op.queue is Queue.COMPUTE:
            self.wait(op)
            self._actions.perform(op, values)
            return
        self._queues[op.queue].add((op, values, self._numbers(op)))
        self._tickets.issued[op.queue] += 1
        self._latest[id(op)] = self._tickets.issued[op.queue]

    def _numbers(self, op: Op) -> tuple[tuple[Queue, int], ...]:
        """What `op` waits for: in each case the instance issued last, of this step or the one before."""
        return tuple((queue, self._latest[key]) for queue, key in self._waits[id(op)] if key in self._latest)

    def wait(self, op: Op) -> None:
        """Return when `op` may compute. Raises what went wrong on a queue."""
        waits = self._numbers(op)
        if waits and any(self._tickets.done[queue] < number for queue, number in waits):
            self.flush()
            for queue, number in waits:
                self._tickets.wait(queue, number)
        self._check()

    def done(self, op: Op) -> None:
        """Nothing to record: what is issued later finds it done."""

    def flush(self) -> None:
        """Let the queues see what was issued. Raises what went wrong on a queue."""
        for queue in self._queues.values():
            queue.flush()
        self._check()

    def drain(self) -> None:
        """Return when every queue is empty. Raises what went wrong on a queue."""
        self.flush()
        for queue in self._queues:
            self._tickets.wait(queue, self._tickets.issued[queue])
        self._check()

    def close(self) -> None:
        """End the queues' threads; what they have not begun is left undone."""
        self._tickets.close()
        for queue in self._queues.values():
            queue.close()

    def _check(self) -> None:
        if self._tickets.error is not None:
            raise self._tickets.error

"""Runs programs on CUDA: one stream computes, and each direction of copies has a stream. The computing thread also
issues copies that wait for nothing on the host; all other operations have a thread for each queue.

An operation has a ticket on the host, which says that its stream has it, and an event, which says that it is done. A
waiter waits for the ticket first, because a stream does not wait for an event that is not recorded yet. For CPU updates
and reads from disk the ticket says that they are done. The computing thread waits for tickets only, never for the
device.

Memory is allocated and freed in the order of the computing stream, to which it belongs. A copy waits for the event of
the allocation, and the computing stream waits for the copy's event before the release. So the allocator's own rule,
reuse in stream order, is right although other streams use the memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from planner.graph import forget_workspaces
from planner.out_of_memory import as_one_error
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.places import Spans
from worker.runtime.arena import Memory, NoPlaces, PlannedMemory, arena
from worker.runtime.host_values import HostValues
from worker.runtime.interpreter import Performer, Together
from worker.runtime.machine import Batch, RandomState
from worker.runtime.queues import QueueInterpreter
from worker.runtime.recording import Recording, now
from worker.runtime.registered import pinned, pinned_like, registered
from worker.runtime.small_copies import SmallCopies, packed_bytes
from worker.runtime.step_values import StepValues
from worker.runtime.threads import compute_with

log = logging.getLogger(__name__)

# PyTorch's allocator may have 1/20 more than the plan's peak: it rounds up and cannot use every gap. With places a plan
# needs only its peak; evaluation and generation have no places, so they leave this share free.
_PACKING = 20


class CudaMachine:
    """One CUDA device, and host memory that is page-locked for it.

    Computation runs on the device's default stream, which is every thread's current one. So what a caller does with a
    loss is ordered after the work that made it."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.stream = torch.cuda.default_stream(self.device)
        self._small = SmallCopies(self.device, self.stream)
        self._fraction: float | None = None
        self._arena, self._placed, self._cold = arena(), False, True
        self._outside_bytes = self._bytes_outside()

    def interpreter(self, program: Program, performer: Performer) -> CudaInterpreter:
        """Make the queues (streams and threads) that run the operations of `program` on this device."""
        return CudaInterpreter(program, performer, self)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A context that each thread is in while it computes on the device: PyTorch keeps the current device and stream
        per thread. An allocation that fails inside raises torch.OutOfMemoryError, whichever allocator refused it."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), as_one_error():
            yield

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """Reserve the device's memory for a program whose tensors have the `offsets` (bytes) that a plan gives them; if
        `offsets` is empty, tensors lie wherever the allocator puts them. Must be called before any tensor of the
        program is allocated. Raises torch.OutOfMemoryError."""
        if not offsets:
            return NoPlaces()
        if self._arena is None:
            log.warning("device: the plan's places for tensors are not used, so it may run out of memory")
            return NoPlaces()
        with torch.cuda.device(self.device):  # the driver gives memory of the thread's own device
            self.forget_threads()  # workspaces that planning has left in this process lie beside the arena
            memory = PlannedMemory(self._arena, program, chain, Spans(program, chain).arrangement(offsets))
        self._placed = True
        return memory

    def frame(self, batch: Batch) -> AbstractContextManager[object]:
        """A context around the model's own `forward`, entered in a thread that computes. Transformers asks there
        whether texts are packed or padded; inside this context the host answers, so that nobody waits for the
        device."""
        return HostValues(self.device, self._small.on_host(batch))

    def on_host(self) -> AbstractContextManager[object]:
        """A context around work on the host in a thread that otherwise computes on the device."""
        return contextlib.nullcontext()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous host tensor of this shape and dtype, filled with zeros and page-locked, so that the
        device can access it directly. It is freed with the last tensor that uses it. Raises UserError
        "host-memory-not-registered"."""
        size = math.prod(shape) * dtype.itemsize
        return registered(size, self.device)[:size].view(dtype).view(tuple(shape))

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a contiguous tensor on the device: the tensor itself if it is there already and the plan
        gives tensors no places, else a copy."""
        if tensor.device == self.device and tensor.is_contiguous() and not self._placed:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)

    def stage(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to PyTorch's pool of pinned memory, from which the device can copy it while the host goes
        on. The pool uses the memory again when that copy is done. Raises UserError "host-memory-not-registered"."""
        return pinned_like(tensor)

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy a few bytes that were just computed to `target`, a tensor made by `host_empty`, while computation goes
        on. Returns a function that waits until the copy is done."""
        return self._small.to_host(target, source)

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """Copy a step's `batches`, one per slice, to the device, into memory of at least `least_bytes` bytes: see
        `SmallCopies.stage`. Raises UserError "host-memory-not-registered", torch.OutOfMemoryError."""
        packed = pinned(packed_bytes(batches))
        with self.computing():
            staged = self._small.stage(batches, packed, least_bytes)
        return [{name: t if t.is_cuda else self.stage(t) for name, t in batch.items()} for batch in staged]

    def batches_were_read(self) -> None:
        """Say that all slices issued so far have read the batches that `stage_step` copied, so that their memory may be
        used again."""
        self._small.were_read()

    def forget_batches(self) -> None:
        """Free the device memory that `stage_step` took for batches."""
        self._small.forget_batches()

    def seeded(self, seed: int) -> RandomState:
        """The random state, of the host's generator and the device's, that `torch.manual_seed(seed)` sets. The
        generators in use are not changed."""
        return tuple(torch.Generator(device).manual_seed(seed).get_state() for device in ("cpu", self.device))

    def random_state(self) -> RandomState:
        """The current state of the host's and the device's random generators. The device's state is a seed and an
        offset kept on the host, so nobody waits for the device."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: RandomState) -> None:
        """Set the host's and the device's random generators to `state`."""
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)

    @property
    def is_cold(self) -> bool:
        """Whether threads lack cuBLAS workspaces while the plan gives tensors their places. Then no workspace may be
        allocated while a block computes: it would take the place of a tensor of its size, and stay there."""
        return self._placed and self._cold

    def warm_up(self) -> None:
        """Multiply two small matrices, so that cuBLAS allocates the calling thread's workspace."""
        with self.computing(), torch.no_grad():
            unit = torch.zeros((1, 1), device=self.device)
            torch.mm(unit, unit)
        self._cold = False

    def own_code(self, on: bool) -> None:
        """Put the allocations that follow into the area that the plan has for a block's own PyTorch code (`on`), or
        stop doing so."""
        if self._arena is not None and self._placed:
            self._arena.own_code(on)

    def forget_threads(self) -> None:
        """Free cuBLAS's workspaces. The allocator orders their next use after the work that still runs on the
        device."""
        forget_workspaces()
        self._cold = True

    def stop_metering(self) -> None:
        """Do nothing: on CUDA the allocator counts bytes at no cost."""

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """Limit the allocator to `budget_bytes` less what the runtime (code of kernels, libraries) has taken since this
        machine was made, but never below what the plan, whose peak is `peak_bytes`, needs. Memory that another process
        takes cannot be told from the runtime's. Returns how many bytes of the limit are for tensors, when these have no
        places in the plan."""
        runtime = max(0, self._bytes_outside() - self._outside_bytes)
        if self._arena is not None:
            capped = allocator_bytes(budget_bytes, peak_bytes, runtime, placed=self._placed)
            self._arena.empty()
            self._arena.set_limit(capped)
            return min(budget_bytes, tensor_bytes(capped))
        if self._fraction is None:
            self._fraction = torch.cuda.get_per_process_memory_fraction(self.device)
        total = torch.cuda.mem_get_info(self.device)[1]
        capped = min(allocator_bytes(budget_bytes, peak_bytes, runtime), int(self._fraction * total))
        torch.cuda.set_per_process_memory_fraction(capped / total, self.device)
        return min(budget_bytes, tensor_bytes(capped))

    def uncap(self) -> None:
        """Restore the allocator's limit that held before the first `cap`."""
        if self._arena is not None:
            self._arena.set_limit(None)
        if self._fraction is not None:
            torch.cuda.set_per_process_memory_fraction(self._fraction, self.device)
            self._fraction = None

    def _bytes_outside(self) -> int:
        """Device memory in use that is not the allocator's."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device) if self._arena is None else self._arena.counts().reserved
        return int(total - free - reserved)

    def synchronize(self) -> None:
        """Wait until the device has finished all work given to it."""
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Start measuring the peak of the allocator's bytes anew."""
        if self._arena is not None:
            self._arena.reset_peaks()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most bytes in use in the allocator's blocks since `reset_peak`."""
        if self._arena is not None:
            return self._arena.counts().most_allocated
        return torch.cuda.max_memory_allocated(self.device)


def allocator_bytes(budget_bytes: int, peak_bytes: int, runtime_bytes: int, *, placed: bool = False) -> int:
    """The number of bytes that the allocator may take under a budget: `budget_bytes` less `runtime_bytes`, and at least
    what a plan with the peak `peak_bytes` needs. If the plan's tensors are not `placed` at fixed offsets, that need
    includes the bytes lost to fragmentation."""
    return max(budget_bytes - runtime_bytes, peak_bytes if placed else peak_bytes + peak_bytes // _PACKING)


def tensor_bytes(allocator_bytes: int) -> int:
    """The number of bytes that tensors can have of the allocator's: `allocator_bytes` less those lost to
    fragmentation."""
    return allocator_bytes * _PACKING // (_PACKING + 1)


class CudaInterpreter(QueueInterpreter):
    """Runs a program's operations on CUDA: issues them to streams, or does them in a queue's thread."""

    def __init__(self, program: Program, performer: Performer, machine: CudaMachine) -> None:
        self._performer, self._machine, self._threads = performer, machine, torch.get_num_threads()
        self._streams = {
            Queue.COMPUTE: machine.stream,
            Queue.H2D: torch.cuda.Stream(machine.device),  # type: ignore[no-untyped-call]
            Queue.D2H: torch.cuda.Stream(machine.device),  # type: ignore[no-untyped-call]
        }
        # One event per operation, recorded anew in each step. Who waits for this step's recording has issued its wait
        # before the next one: both operations touch the same copy, so the program's order puts the waiter first.
        by_name = {op.name: op for op in program.ops}
        awaited = {id(by_name[name]) for op in program.ops for name in op.waits if by_name[name].queue in self._streams}
        self._events = {key: _event() for key in awaited}
        super().__init__(program)

    def setup(self, queue: Queue) -> None:
        """Prepare the new thread of `queue`, as PyTorch keeps the current device and stream per thread. If the queue
        has a stream, the thread's copies go to that stream."""
        torch.set_grad_enabled(False)
        compute_with(self._threads)
        torch.cuda.set_device(self._machine.device)
        if queue in self._streams:
            torch.cuda.set_stream(self._streams[queue])

    def run(self, ops: Together, values: StepValues | None) -> None:
        """Launch `ops` on their stream, after the events that they wait for. CPU updates and disk operations instead
        wait for these events on the host, and run in the calling thread."""
        stream = self._streams.get(ops[0].queue)
        if stream is not None:
            self._wait_on_stream(ops[0])
        else:
            for event in self._events_before(ops[0]):
                event.synchronize()
        if values is not None:
            self._do(ops, values, stream)
        if stream is not None:
            self.done(ops[-1])

    def never_waits(self, op: Op) -> bool:
        """Whether `op` is a copy that only has to be launched on a stream, so that issuing it never blocks the host."""
        return op.queue in self._streams and self._performer.only_copies(op)

    def run_here(self, ops: Together, values: StepValues | None) -> None:
        """Do as `run`, but in the computing thread, and make the computing stream current again afterwards."""
        torch.cuda.set_stream(self._streams[ops[0].queue])
        try:
            self.run(ops, values)
        finally:
            torch.cuda.set_stream(self._machine.stream)

    def _do(self, ops: Together, values: StepValues, stream: torch.cuda.Stream | None) -> None:
        """Perform `ops` on their stream, which is the thread's current one, or on the host."""
        if (recording := self.recording) is None:
            self._performer.perform(ops, values)
            return
        mark: Callable[[], Any] = now if stream is None else functools.partial(_mark, stream)
        for op in ops:
            begin = mark()
            self._performer.perform((op,), values)
            recording.add(op, values.number, begin, mark())

    def wait(self, op: Op) -> None:
        """Make the computing stream wait for all that the turn `op` (one block's computation on one slice) needs.
        Returns when all of this is issued; the host does not wait for the device. Raises the first error of a queue."""
        super().wait(op)
        self._wait_on_stream(op)
        if self.recording is not None:
            self.recording.begin_turn(op, _mark(self._streams[Queue.COMPUTE]))

    def record(self) -> None:
        """Start recording when operations run. On streams the times are those of CUDA events, measured from an event
        that has just passed."""
        self._finish()
        tries = []
        for _ in range(5):  # the shortest try is the one that nothing has delayed
            before = now()
            mark = _mark(self._machine.stream)
            mark.synchronize()
            tries.append((now() - before, before, mark))
        length_ns, zero_ns, zero = min(tries, key=lambda attempt: attempt[0])
        zero_ns += length_ns // 2

        def ns_of(mark: torch.cuda.Event | int) -> int:
            return mark if isinstance(mark, int) else zero_ns + round(1e6 * zero.elapsed_time(mark))

        self.recording = Recording(self._program, ns_of)

    def done(self, op: Op) -> None:
        """Record the event of `op`, which has been issued, on the stream that it runs on."""
        if self.recording is not None and op.kind is OpKind.RUN:
            self.recording.end_turn(op, _mark(self._streams[Queue.COMPUTE]))
        event = self._events.get(id(op))
        if event is not None:
            event.record(self._streams[op.queue])

    def drain(self) -> None:
        """Wait until every queue is empty and every stream has finished. Raises the first error of a queue."""
        super().drain()
        self._finish()

    def close(self) -> None:
        """End the queues' threads, after waiting for the copies that were issued, because their memory may be freed
        afterwards."""
        super().close()
        self._finish()

    def _finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _wait_on_stream(self, op: Op) -> None:
        for event in self._events_before(op):
            self._streams[op.queue].wait_event(event)

    def _events_before(self, op: Op) -> Iterator[torch.cuda.Event]:
        """Events of what `op` waits for. An event that was never recorded, in the first step, delays nobody."""
        for other in self.waits[id(op)]:
            if other.queue in self._streams:
                yield self._events[id(other)]


def _event() -> torch.cuda.Event:
    """A new event. The CPU queue sleeps while it waits for one (`blocking`), and does not spin."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event in the stream whose time can be read once it has passed."""
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record(stream)
    return mark

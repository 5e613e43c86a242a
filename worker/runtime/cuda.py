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

log = logging.getLogger(__name__)

# PyTorch's allocator may have 1/20 more than the plan's peak: it rounds up and cannot use every gap. With places a plan
# needs only its peak; evaluation and generation have no places, so they leave this share free.
_PACKING = 20


class CudaMachine:
    """One CUDA device, and host memory registered with it.

    Computation runs on the device's default stream, which is every thread's current one: so a caller's work on losses
    comes after the work that made them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.stream = torch.cuda.default_stream(self.device)
        self._small = SmallCopies(self.device, self.stream)
        self._fraction: float | None = None
        self._arena, self._placed, self._cold = arena(), False, True
        self._outside_bytes = self._bytes_outside()

    def interpreter(self, program: Program, performer: Performer) -> CudaInterpreter:
        """Queues for `program` on this device."""
        return CudaInterpreter(program, performer, self)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Entered by every thread for the time it computes on the device: device and stream are thread state. Raises
        torch.OutOfMemoryError where the device has no room, whichever allocator says so."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream), as_one_error():
            yield

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """Take the device's memory for a program whose tensors lie at `offsets`; without any they have no places. Must
        be called before any of its tensors is there. Raises torch.OutOfMemoryError."""
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
        """Entered around the model's own forward, in a thread that computes. Transformers asks there whether texts are
        packed or padded; inside, the host answers."""
        return HostValues(self.device, self._small.on_host(batch))

    def on_host(self) -> AbstractContextManager[object]:
        """Entered around work on the host in a thread that computes."""
        return contextlib.nullcontext()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Registered host memory, contiguous, zero. It lives as long as a tensor uses it. Raises UserError
        "host-memory-not-registered"."""
        size = math.prod(shape) * dtype.itemsize
        return registered(size, self.device)[:size].view(dtype).view(tuple(shape))

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, contiguous: itself if it is there already and the plan has no places."""
        if tensor.device == self.device and tensor.is_contiguous() and not self._placed:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)

    def stage(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned memory of torch's own pool, which reuses it when the copy to the device is done. Raises
        UserError "host-memory-not-registered"."""
        return pinned_like(tensor)

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy a few bytes that were just computed to memory of `host_empty`, while computing goes on. Returns a
        function that waits until they are there."""
        return self._small.to_host(target, source)

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """A step's batches on the device, in room for `least_bytes` at least: see `SmallCopies.stage`. Raises
        UserError "host-memory-not-registered", torch.OutOfMemoryError."""
        packed = pinned(packed_bytes(batches))
        with self.computing():
            staged = self._small.stage(batches, packed, least_bytes)
        return [{name: t if t.is_cuda else self.stage(t) for name, t in batch.items()} for batch in staged]

    def batches_were_read(self) -> None:
        """The slices that have run have read their batches."""
        self._small.were_read()

    def forget_batches(self) -> None:
        """Give back the room that batches had."""
        self._small.forget_batches()

    def seeded(self, seed: int) -> RandomState:
        """The random state that `torch.manual_seed(seed)` sets, on the host and on the device."""
        return tuple(torch.Generator(device).manual_seed(seed).get_state() for device in ("cpu", self.device))

    def random_state(self) -> RandomState:
        """The current state of the generators a model draws from. The device's is a seed and an offset on the host."""
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: RandomState) -> None:
        """Go on from `state`."""
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)

    @property
    def is_cold(self) -> bool:
        """Whether threads lack cuBLAS workspaces while tensors have places. Then no workspace may be allocated within a
        turn: it would take the place of a tensor of its size, and stay."""
        return self._placed and self._cold

    def warm_up(self) -> None:
        """Multiply two matrices, so that the calling thread has its workspace."""
        with self.computing(), torch.no_grad():
            unit = torch.zeros((1, 1), device=self.device)
            torch.mm(unit, unit)
        self._cold = False

    def own_code(self, on: bool) -> None:
        """From now on allocations go to the area that the plan has for own code, or (off) no longer do."""
        if self._arena is not None and self._placed:
            self._arena.own_code(on)

    def forget_threads(self) -> None:
        """Free cuBLAS's workspaces. What still runs on the device ends before the next user of their memory begins."""
        forget_workspaces()
        self._cold = True

    def stop_metering(self) -> None:
        """Nothing to do: the allocator counts anyway."""

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """Limit the allocator to the budget less what the runtime has taken since this machine was made (code of
        kernels, libraries), but never below what the plan needs. Another process's memory cannot be told from the
        runtime's. Returns the bytes of the limit that tensors without places can have.
        """
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
        """Allow what was allowed before the first `cap`."""
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
        """Return when the device has done all it was given."""
        torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        """Begin to measure the peak of a step."""
        if self._arena is not None:
            self._arena.reset_peaks()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most bytes of the allocator's blocks in use since `reset_peak`."""
        if self._arena is not None:
            return self._arena.counts().most_allocated
        return torch.cuda.max_memory_allocated(self.device)


def allocator_bytes(budget_bytes: int, peak_bytes: int, runtime_bytes: int, *, placed: bool = False) -> int:
    """What the allocator may have under a budget: all but the runtime's share, and at least what a plan of that peak
    needs. If its tensors are not `placed`, it also needs room for what the allocator loses between its blocks."""
    return max(budget_bytes - runtime_bytes, peak_bytes if placed else peak_bytes + peak_bytes // _PACKING)


def tensor_bytes(allocator_bytes: int) -> int:
    """What tensors can have of the allocator's bytes: all but what it loses between its blocks."""
    return allocator_bytes * _PACKING // (_PACKING + 1)


class CudaInterpreter(QueueInterpreter):
    """Issues operations to streams."""

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
        """Set what is thread state. A queue that has a stream issues its copies to it."""
        torch.set_grad_enabled(False)
        torch.set_num_threads(self._threads)
        torch.cuda.set_device(self._machine.device)
        if queue in self._streams:
            torch.cuda.set_stream(self._streams[queue])

    def run(self, ops: Together, values: StepValues | None) -> None:
        """Give `ops` to their stream, behind what they wait for. CPU updates and disk operations wait on the host, and
        run there."""
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
        """Whether `op` is a copy that only has to be given to a stream."""
        return op.queue in self._streams and self._performer.only_copies(op)

    def run_here(self, ops: Together, values: StepValues | None) -> None:
        """`run` in the computing thread, which then goes back to the computing stream."""
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
        """Let the computing stream wait for what the turn `op` needs; return when all of it is issued."""
        super().wait(op)
        self._wait_on_stream(op)
        if self.recording is not None:
            self.recording.begin_turn(op, _mark(self._streams[Queue.COMPUTE]))

    def record(self) -> None:
        """Record from now on when operations run: on streams by events, whose times are counted from an event that has
        just passed."""
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
        """`op` is on its stream: record its event there."""
        if self.recording is not None and op.kind is OpKind.RUN:
            self.recording.end_turn(op, _mark(self._streams[Queue.COMPUTE]))
        event = self._events.get(id(op))
        if event is not None:
            event.record(self._streams[op.queue])

    def drain(self) -> None:
        """Return when every queue is empty and every stream is done."""
        super().drain()
        self._finish()

    def close(self) -> None:
        """End the queues' threads, after the copies that were issued: their memory may be freed then."""
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

"""Implements the device interface (`worker.runtime.machine.Machine`) on the CPU: copies between "device" and "host" are
real copies in main memory, and each queue of operations is a thread."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from planner.cpu.adamw import cpu_kernel
from planner.cpu.meter import Meter
from planner.graph import keep_device_guard
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, Program, Queue
from worker.runtime.arena import Memory, NoPlaces
from worker.runtime.interpreter import Perform, Performer, Together
from worker.runtime.machine import Batch, RandomState
from worker.runtime.queues import QueueInterpreter
from worker.runtime.recording import now
from worker.runtime.slabs import map_memory
from worker.runtime.step_values import StepValues
from worker.runtime.threads import compute_with


class CpuMachine:
    """A device whose memory, like the host's, is this computer's main memory. With `metered`, the bytes that stand for
    device memory are counted."""

    def __init__(self, *, metered: bool) -> None:
        self.device = torch.device("cpu")
        self.meter: Meter | None = Meter() if metered else None
        cpu_kernel()  # chosen now: in a step, its trial would count as device memory
        keep_device_guard()  # done now, since slices trace in their own threads later

    def interpreter(self, program: Program, performer: Performer) -> CpuInterpreter:
        """Make the queues (one thread each) that run the operations of `program`. `performer` does the work of each
        operation."""
        return CpuInterpreter(program, performer.perform)

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """Return the object that decides where tensors lie on the device. On the CPU it decides nothing: `offsets`, the
        places in a plan, are ignored."""
        return NoPlaces()

    def computing(self) -> AbstractContextManager[object]:
        """A context that each thread is in while it computes on the device. It counts the device memory that is
        allocated inside, if bytes are metered."""
        return self.meter.watch() if self.meter else contextlib.nullcontext()

    def frame(self, batch: Batch) -> AbstractContextManager[object]:
        """A context for the model's own `forward`. On the CPU it does nothing."""
        return contextlib.nullcontext()

    def on_host(self) -> AbstractContextManager[object]:
        """A context for work on the host in a thread that otherwise computes on the device: allocations inside are not
        counted as device memory."""
        return self.meter.host() if self.meter else contextlib.nullcontext()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous host tensor of this shape and dtype, filled with zeros, in memory mapped for it
        alone."""
        size = math.prod(shape) * dtype.itemsize
        slab = torch.frombuffer(map_memory(size, mmap.mmap), dtype=torch.uint8)
        return self._on_host(slab[:size].view(dtype).view(tuple(shape)))

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as device memory, and count its bytes if metered: the tensor itself if it is contiguous and
        fills a storage of its own, else a copy."""
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        if self.meter:
            self.meter.add(tensor)
        return tensor

    def seeded(self, seed: int) -> RandomState:
        """The random state that `torch.manual_seed(seed)` sets. The generator in use is not changed."""
        return (torch.Generator().manual_seed(seed).get_state(),)

    def random_state(self) -> RandomState:
        """The current state of PyTorch's CPU generator."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: RandomState) -> None:
        """Set PyTorch's CPU generator to `state`."""
        torch.set_rng_state(state[0])

    @property
    def is_cold(self) -> bool:
        """Whether threads must call `warm_up` before they compute: always False, because on the CPU libraries keep no
        workspaces."""
        return False

    def warm_up(self) -> None:
        """Do nothing: on the CPU there are no library workspaces to allocate."""

    def own_code(self, on: bool) -> None:
        """Do nothing: on the CPU the allocations of a block's own code need no area of their own."""

    def forget_threads(self) -> None:
        """Do nothing: on the CPU there are no library workspaces to free."""

    def stop_metering(self) -> None:
        """Stop counting device bytes, which takes time."""
        self.meter = None

    def stage(self, tensor: Tensor) -> Tensor:
        """Return the host tensor `tensor` itself: only on a GPU must it be copied to pinned memory before the device
        can read it."""
        return self._on_host(tensor)

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Copy the device tensor `source` to the host tensor `target`. The copy is done on return, so there is no
        function to wait for it."""
        target.copy_(source)

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """Return a step's `batches`, one per micro-batch, with the same tensors. On a GPU they would be copied to the
        device here; `least_bytes` is for that copy."""
        return [{name: self.stage(tensor) for name, tensor in batch.items()} for batch in batches]

    def batches_were_read(self) -> None:
        """Do nothing: `stage_step` makes no copies on the CPU whose memory could be used again."""

    def forget_batches(self) -> None:
        """Do nothing: `stage_step` makes no copies on the CPU that could be freed."""

    def _on_host(self, tensor: Tensor) -> Tensor:
        if self.meter:
            with self.meter.host():
                self.meter.add(tensor)
        return tensor

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """Return `budget_bytes`: allocations in host memory cannot be limited, so all of the budget may be planned
        with."""
        return budget_bytes

    def uncap(self) -> None:
        """Do nothing: `cap` sets no limit on the CPU."""

    def synchronize(self) -> None:
        """Do nothing: on the CPU no work is in progress outside of the queues' threads."""

    def reset_peak(self) -> None:
        """Start measuring the peak of device bytes anew."""
        if self.meter:
            self.meter.reset_peak()

    def peak_bytes(self) -> int | None:
        """The most bytes of device memory in use since `reset_peak`; None if they are not metered."""
        return self.meter.peak if self.meter else None


class CpuInterpreter(QueueInterpreter):
    """Runs a program's operations on queues that are threads. An operation's ticket, the sign that other queues wait
    for, means here that the operation is done."""

    def __init__(self, program: Program, perform: Perform) -> None:
        self._perform, self._threads = perform, torch.get_num_threads()
        super().__init__(program)

    def setup(self, queue: Queue) -> None:
        """Prepare the new thread of `queue`: settings that PyTorch keeps per thread (gradient mode, number of threads)
        do not follow from the thread that started it."""
        torch.set_grad_enabled(False)
        compute_with(self._threads)

    def run(self, ops: Together, values: StepValues | None) -> None:
        """Do the operations `ops` in this thread; while a recording is made, one by one, with the times of each.
        Without `values` do nothing."""
        if values is None:
            return
        if (recording := self.recording) is None:
            self._perform(ops, values)
            return
        for op in ops:
            begin = now()
            self._perform((op,), values)
            recording.add(op, values.number, begin, now())

    def wait(self, op: Op) -> None:
        """Return when the operation `op`, one block's computation on one micro-batch, may begin. Raises the first error
        of a queue."""
        super().wait(op)
        if self.recording is not None:
            self.recording.begin_turn(op, now())

    def done(self, op: Op) -> None:
        """Note that the operation `op`, one block's computation on one micro-batch, is done, so that queues that wait
        for it go on."""
        if self.recording is not None:
            self.recording.end_turn(op, now())

"""The CPU as device: copies are real copies, each queue is a thread."""

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


class CpuMachine:
    """Host and device are both this computer's memory; with `metered`, what counts as device memory is counted."""

    def __init__(self, *, metered: bool) -> None:
        self.device = torch.device("cpu")
        self.meter: Meter | None = Meter() if metered else None
        cpu_kernel()  # chosen now: in a step, its trial would count as device memory
        keep_device_guard()  # done now, since slices trace in their own threads later

    def interpreter(self, program: Program, performer: Performer) -> CpuInterpreter:
        """Queues for `program`."""
        return CpuInterpreter(program, performer.perform)

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """No places: the host's memory has room everywhere."""
        return NoPlaces()

    def computing(self) -> AbstractContextManager[object]:
        """Entered by every thread for the time it computes on the device."""
        return self.meter.watch() if self.meter else contextlib.nullcontext()

    def frame(self, batch: Batch) -> AbstractContextManager[object]:
        """Entered around the model's own forward, in a thread that computes."""
        return contextlib.nullcontext()

    def on_host(self) -> AbstractContextManager[object]:
        """Entered around work on the host in a thread that computes."""
        return self.meter.host() if self.meter else contextlib.nullcontext()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory of exactly that size, contiguous."""
        size = math.prod(shape) * dtype.itemsize
        slab = torch.frombuffer(map_memory(size, mmap.mmap), dtype=torch.uint8)
        return self._on_host(slab[:size].view(dtype).view(tuple(shape)))

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor` as device memory: itself if it fills a storage of its own."""
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes:
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

    @property
    def is_cold(self) -> bool:
        """Never: libraries keep nothing here."""
        return False

    def warm_up(self) -> None:
        """Nothing to do: libraries keep nothing here."""

    def own_code(self, on: bool) -> None:
        """Nothing to do: allocations may lie anywhere."""

    def forget_threads(self) -> None:
        """Nothing to do: libraries keep nothing here."""

    def stop_metering(self) -> None:
        """Stop counting bytes."""
        self.meter = None

    def stage(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return self._on_host(tensor)

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """The batches themselves."""
        return [{name: self.stage(tensor) for name, tensor in batch.items()} for batch in batches]

    def batches_were_read(self) -> None:
        """Nothing to do: batches have no room of their own."""

    def forget_batches(self) -> None:
        """Likewise."""

    def _on_host(self, tensor: Tensor) -> Tensor:
        if self.meter:
            with self.meter.host():
                self.meter.add(tensor)
        return tensor

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """The host's memory has no cap; the meter tells what was used. Returns the whole budget."""
        return budget_bytes

    def uncap(self) -> None:
        """Nothing to do: there is no cap."""

    def synchronize(self) -> None:
        """Nothing to do: nothing runs outside of the threads."""

    def reset_peak(self) -> None:
        """Begin to measure the peak of a step."""
        if self.meter:
            self.meter.reset_peak()

    def peak_bytes(self) -> int | None:
        """The most device bytes since `reset_peak`; None when they are not counted."""
        return self.meter.peak if self.meter else None


class CpuInterpreter(QueueInterpreter):
    """Runs operations on queues that are threads. A ticket means that the operation is done."""

    def __init__(self, program: Program, perform: Perform) -> None:
        self._perform, self._threads = perform, torch.get_num_threads()
        super().__init__(program)

    def setup(self, queue: Queue) -> None:
        """Set what is thread state: a new thread records gradients, and has its own number of threads."""
        torch.set_grad_enabled(False)
        torch.set_num_threads(self._threads)

    def run(self, ops: Together, values: StepValues | None) -> None:
        """Do `ops`, one by one while a recording notes when they run. Without `values` do nothing."""
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
        """Return when the turn `op` may compute. Raises what went wrong on a queue."""
        super().wait(op)
        if self.recording is not None:
            self.recording.begin_turn(op, now())

    def done(self, op: Op) -> None:
        """The turn `op` has computed."""
        if self.recording is not None:
            self.recording.end_turn(op, now())

"""Defines what differs between kinds of device, apart from the queues."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from planner.schedule.chain import Chain
from planner.schedule.compile import Program
from worker.runtime.arena import Memory

if TYPE_CHECKING:  # imported for annotations only
    from worker.runtime.interpreter import Interpreter, Performer

RandomState = tuple[Tensor, ...]
Batch = Mapping[Any, Tensor]
"""Tensors of a slice by their names."""


class Machine(Protocol):
    """A device with the host beside it."""

    device: torch.device

    def interpreter(self, program: Program, performer: Performer) -> Interpreter:
        """Make queues for `program`. `performer` does each of its operations except RUN."""

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """Take the device's memory for a program whose tensors lie at `offsets`; without any they have no places. Must
        be called before any of its tensors is there. Raises torch.OutOfMemoryError."""

    def computing(self) -> AbstractContextManager[object]:
        """Entered by every thread for the time it computes on the device."""

    def frame(self, batch: Batch) -> AbstractContextManager[object]:
        """Entered around the model's own forward on a staged batch, in a thread that computes."""

    def on_host(self) -> AbstractContextManager[object]:
        """Entered around work on the host in a thread that computes."""

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that copies can reach, contiguous, zero, of exactly that size in whole pages, page-locked once.
        It lives as long as a tensor uses it."""

    def place(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device, contiguous, in a storage of its own size: itself where possible."""

    def seeded(self, seed: int) -> RandomState:
        """The random state that `torch.manual_seed(seed)` sets."""

    def random_state(self) -> RandomState:
        """The current state of the generators a model draws from."""

    def set_random_state(self, state: RandomState) -> None:
        """Go on from `state`."""

    @property
    def is_cold(self) -> bool:
        """Whether `warm_up` must run in the threads that compute, before a step whose tensors have places."""

    def warm_up(self) -> None:
        """Let the calling thread allocate what libraries keep on the device for each thread that computes."""

    def own_code(self, on: bool) -> None:
        """From now on a layer's own code makes the allocations (`on`), or no longer does."""

    def forget_threads(self) -> None:
        """Free what libraries keep on the device for each thread that has computed. A thread that computes again gets
        it anew."""

    def stop_metering(self) -> None:
        """Stop counting bytes, if counting takes time."""

    def stage(self, tensor: Tensor) -> Tensor:
        """A host tensor of the data loader's, in memory from which the device can copy it without anyone waiting."""

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None] | None:
        """Copy a few bytes that were just computed to memory of `host_empty`, while computing goes on. Returns a
        function that waits until they are there; None if they are there already."""

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """A step's batches in memory from which each slice can copy its own without waiting for the step's fetches. If
        this is on the device, it is room for `least_bytes` at least."""

    def batches_were_read(self) -> None:
        """The slices that have run have read their batches."""

    def forget_batches(self) -> None:
        """Give back the room that batches had. No step is running."""

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """Limit allocations to the budget, of which the plan needs `peak_bytes`. Called again when a step has run,
        since it is known then what the runtime takes beside the allocations. Returns how many of the budget's bytes
        other programs (evaluation, generation) may plan with."""

    def uncap(self) -> None:
        """Allow what was allowed before the first `cap`."""

    def synchronize(self) -> None:
        """Return when the device has done all it was given."""

    def reset_peak(self) -> None:
        """Begin to measure the peak of a step."""

    def peak_bytes(self) -> int | None:
        """The most device bytes since `reset_peak`; None when they are not counted."""

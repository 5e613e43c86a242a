"""Defines the interface by which the engine uses a device and the memory of its host; `cpu.py` and `cuda.py` implement
it."""

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
    """A device (a GPU, or the CPU in its place) together with its host's memory."""

    device: torch.device

    def interpreter(self, program: Program, performer: Performer) -> Interpreter:
        """Make the queues that run the operations of `program`. `performer` does the work of each operation except RUN,
        the computation of a block."""

    def memory(self, program: Program, chain: Chain, offsets: Sequence[int]) -> Memory:
        """Reserve the device's memory for a program whose tensors have the `offsets` (bytes) that a plan gives them; if
        `offsets` is empty, tensors lie wherever the allocator puts them. Must be called before any tensor of the
        program is allocated. Raises torch.OutOfMemoryError."""

    def computing(self) -> AbstractContextManager[object]:
        """A context that each thread is in while it computes on the device."""

    def frame(self, batch: Batch) -> AbstractContextManager[object]:
        """A context around the model's own `forward` on a batch that `stage_step` has made. It is entered in a thread
        that computes."""

    def on_host(self) -> AbstractContextManager[object]:
        """A context around work on the host in a thread that otherwise computes on the device."""

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a contiguous host tensor of this shape and dtype, filled with zeros, that the device can access
        directly (on CUDA it is page-locked). It takes the exact size, rounded up to whole pages, and is freed with the
        last tensor that uses it."""

    def place(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a contiguous tensor on the device, in a storage of exactly its size: the tensor itself
        where possible, else a copy."""

    def seeded(self, seed: int) -> RandomState:
        """The random state that `torch.manual_seed(seed)` sets. The generators in use are not changed."""

    def random_state(self) -> RandomState:
        """The current state of the random generators from which a model on this device draws."""

    def set_random_state(self, state: RandomState) -> None:
        """Set the random generators from which a model on this device draws to `state`."""

    @property
    def is_cold(self) -> bool:
        """Whether each thread that computes must call `warm_up` before the next step, because its libraries' workspaces
        would otherwise be allocated in places that the plan has for tensors."""

    def warm_up(self) -> None:
        """Make libraries such as cuBLAS allocate the device workspace that they keep for the calling thread."""

    def own_code(self, on: bool) -> None:
        """Say whether the allocations that follow are made by a block's own PyTorch code (`on`) in place of generated
        code."""

    def forget_threads(self) -> None:
        """Free the device workspaces that libraries such as cuBLAS keep for threads. A thread that computes again gets
        a new one."""

    def stop_metering(self) -> None:
        """Stop counting device bytes, if counting takes time on this device."""

    def stage(self, tensor: Tensor) -> Tensor:
        """Return a host tensor from the data loader in memory from which a copy to the device can run while the host
        goes on (on CUDA: pinned)."""

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None] | None:
        """Copy a few bytes that were just computed from the device tensor `source` to `target`, a tensor made by
        `host_empty`, while computation goes on. Returns a function that waits until the copy is done; None if it is
        done already."""

    def stage_step(self, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
        """Return a step's `batches`, one per slice, copied so that each slice can take its own without waiting for the
        step's fetches of weights. If the copies are on the device, at least `least_bytes` bytes are reserved for them
        there."""

    def batches_were_read(self) -> None:
        """Say that all slices issued so far have read the batches that `stage_step` made, so that their memory may be
        used again."""

    def forget_batches(self) -> None:
        """Free the memory that `stage_step` took for batches. Must be called between steps."""

    def cap(self, budget_bytes: int, peak_bytes: int) -> int:
        """Limit the device's allocations so that they and the runtime (CUDA context, code of kernels) stay within
        `budget_bytes`; the plan needs `peak_bytes`. Called again after the first step, when it is known what the
        runtime takes. Returns how many bytes of the budget evaluation and generation may plan with."""

    def uncap(self) -> None:
        """Restore the limit on allocations that held before the first `cap`."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work given to it."""

    def reset_peak(self) -> None:
        """Start measuring the peak of device bytes anew."""

    def peak_bytes(self) -> int | None:
        """The most bytes of device memory in use since `reset_peak`; None when they are not counted."""

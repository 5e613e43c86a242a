"""Allocates host memory that is registered with CUDA (page-locked), so that the device can access it directly."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from planner.out_of_memory import host_memory_not_registered, is_out_of_memory
from worker.runtime.driver import forget_error
from worker.runtime.slabs import map_memory

_sizes: dict[int, int] = {}  # of registered memory, by address


class _Registered(mmap.mmap):
    """A piece of host memory that is registered with CUDA until it is freed."""

    address: int = 0
    device: torch.device

    def __del__(self) -> None:
        if self.address:
            torch.cuda.synchronize(self.device)  # a slab that grows in a step may have a copy under way
            if int(_cudart().cudaHostUnregister(self.address)):
                forget_error()
            _sizes.pop(self.address, None)


def registered(size: int, device: torch.device) -> Tensor:
    """Allocate `size` bytes, rounded up to whole pages, of host memory that is registered with CUDA (page-locked). It
    is freed with the last tensor that uses it.

    Raises UserError "host-memory-not-registered" where CUDA has no room for it, and torch.cuda.CudaError where CUDA
    refuses it for another reason."""
    memory = map_memory(size, _Registered)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with _reaching(len(memory)):
        torch.cuda.check_error(int(_cudart().cudaHostRegister(tensor.data_ptr(), len(memory), 0)))
    memory.address, memory.device = tensor.data_ptr(), device
    _sizes[memory.address] = len(memory)
    return tensor


def pinned(size: int) -> Tensor:
    """Take `size` bytes from PyTorch's pool of pinned host memory, not initialized. The pool uses them again when the
    copies to the device are done. Raises UserError "host-memory-not-registered"."""
    with _reaching(size):
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pinned_like(tensor: Tensor) -> Tensor:
    """Copy `tensor` into PyTorch's pool of pinned host memory, keeping its strides. Raises UserError
    "host-memory-not-registered"."""
    with _reaching(tensor.nbytes):
        return tensor.pin_memory()


@contextlib.contextmanager
def _reaching(size: int) -> Iterator[None]:
    """A context in which an out-of-memory error of CUDA is raised as UserError "host-memory-not-registered": the host
    has no room for `size` more bytes of registered memory, while the GPU's own memory is not what ran out."""
    try:
        yield
    except RuntimeError as error:
        forget_error()
        if not is_out_of_memory(error):
            raise
        raise host_memory_not_registered(size, registered_bytes(), error) from error


def registered_bytes() -> int:
    """The number of bytes of host memory that this process has registered with CUDA (page-locked) now."""
    return sum(tuple(_sizes.values()))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

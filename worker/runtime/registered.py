"""Host memory that the device reaches by itself."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from worker.runtime.slabs import map_memory


class _Registered(mmap.mmap):
    """Memory that the device can reach."""

    address: int = 0
    device: torch.device

    def __del__(self) -> None:
        if self.address:
            torch.cuda.synchronize(self.device)  # a slab that grows in a step may have a copy under way
            _cudart().cudaHostUnregister(self.address)


def registered(size: int, device: torch.device) -> Tensor:
    """`size` bytes, up to whole pages; freed with the last tensor that uses them."""
    memory = map_memory(size, _Registered)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    torch.cuda.check_error(int(_cudart().cudaHostRegister(tensor.data_ptr(), len(memory), 0)))
    memory.address, memory.device = tensor.data_ptr(), device
    return tensor


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

"""What has a copy in host memory: working copies, optimizer states, gradients, offloaded activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.machine import Machine

STATE_PARTS = ("exp_avg", "exp_avg_sq", "master")


class Host:
    """Host copies by item name: "w:" one tensor, "g:" one, "s:" two, or three where the weights are narrower than fp32
    (then the third is the master), "a:" as many as the block saved. Only what the program moves or updates on the CPU
    is here."""

    def __init__(self, machine: Machine) -> None:
        self.items: dict[str, list[Tensor]] = {}
        self._machine = machine
        self._parked: dict[str, Tensor] = {}
        self._spare: dict[str, list[Tensor]] = {}

    def swap(self, item: str) -> list[Tensor]:
        """Put other memory in the place of the item's, laid out alike and with any content; gives what it was, which is
        kept until the next call."""
        old = self.items[item]
        if item not in self._spare:
            self._spare[item] = [self._machine.host_empty(t.shape, t.dtype) for t in old]
        self.items[item], self._spare[item] = self._spare[item], old
        return old

    def before(self, item: str) -> list[Tensor]:
        """What the item was before its last `swap`."""
        return self._spare[item]

    def park(self, item: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the layouts of `tensors`. Their memory is kept for the next step's tensors."""
        starts, total = [], 0
        for tensor in tensors:
            starts.append(total)
            total += -(-_span_bytes(tensor) // 64) * 64
        memory = self._parked.get(item)
        if memory is None or memory.nbytes < total:
            memory = self._parked[item] = self._machine.host_empty((total,), torch.uint8)
        self.items[item] = [
            memory[start : start + _span_bytes(t)].view(t.dtype).as_strided(t.shape, t.stride())
            for start, t in zip(starts, tensors, strict=True)
        ]
        return self.items[item]


def new_states(weight: Tensor) -> list[Tensor]:
    """Optimizer states of `weight` before the first step, on its device: zero moments and, where it is narrower than
    fp32, the master."""
    moments = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for _ in range(2)]
    return moments if weight.dtype == torch.float32 else [*moments, weight.float()]


def _span_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a tensor with these strides."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()

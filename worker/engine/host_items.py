"""What has a copy in host memory: working copies, optimizer states, gradients, offloaded activations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from worker.runtime.machine import Machine
from worker.runtime.slabs import carve, slab_bytes

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

    def hold(self, name: str, kinds: Collection[str], weight: Tensor, *, overwritten: bool) -> None:
        """Give a tensor's items of these kinds ("w", "g", "s") their memory, one slab for all, and what is in them
        before the first step. `overwritten`: the gradient takes the weight's place."""
        dtypes = {"w": [weight.dtype], "g": [] if overwritten else [weight.dtype], "s": _state_dtypes(weight)}
        wanted = [(f"{kind}:{name}", dtype) for kind in kinds for dtype in dtypes[kind]]
        sizes = [weight.numel() * dtype.itemsize for _, dtype in wanted]
        slab = self._machine.host_empty((slab_bytes(sizes),), torch.uint8)
        for (item, dtype), part in zip(wanted, carve(slab, sizes), strict=True):
            self.items.setdefault(item, []).append(part.view(dtype).view(weight.shape))
        if "w" in kinds:
            self.items[f"w:{name}"][0].copy_(weight)
        if "g" in kinds and overwritten:
            self.items[f"g:{name}"] = self.items[f"w:{name}"]
        if "s" in kinds:
            for master in self.items[f"s:{name}"][2:]:
                master.copy_(weight)

    def park(self, item: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the layouts of `tensors`. Their memory is kept for the next step's tensors."""
        sizes = [span(tensor) * tensor.element_size() for tensor in tensors]
        slab = self._parked.get(item)
        if slab is None or slab.nbytes < slab_bytes(sizes):
            slab = self._parked[item] = self._machine.host_empty((slab_bytes(sizes),), torch.uint8)
        self.items[item] = [
            part.view(t.dtype).as_strided(t.shape, t.stride())
            for t, part in zip(tensors, carve(slab, sizes), strict=True)
        ]
        return self.items[item]


def new_states(weight: Tensor) -> list[Tensor]:
    """Optimizer states of `weight` before the first step, on its device: zero moments and, where it is narrower than
    fp32, the master."""
    states = [torch.zeros(weight.shape, dtype=dtype, device=weight.device) for dtype in _state_dtypes(weight)]
    for master in states[2:]:
        master.copy_(weight)
    return states


def _state_dtypes(weight: Tensor) -> list[torch.dtype]:
    return [torch.float32] * (2 if weight.dtype == torch.float32 else 3)


def span(tensor: Tensor) -> int:
    """Elements from the first to the last one of a tensor with these strides, those in gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

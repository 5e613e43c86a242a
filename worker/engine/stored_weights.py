"""Keeps some trained weights wholly on disk: the host has neither their working copies nor their gradients. Gradients
go to disk through a ring of slots (reused host memory) and come back for their updates, which leave the new working
copies in the same slots."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planner.schedule.items import Item
from planner.schedule.operations import FIRST_GRADIENT_SLOT, GRADIENT_SLOTS
from planner.schedule.state_pieces import whole_pages
from worker.engine.stored_states import Scratch
from worker.runtime.machine import Machine


class StoredWeights:
    """The trained weights that are wholly on disk: their shapes and dtypes, and the ring of slots (reused host memory)
    through which they go, allocated when the first weight is added."""

    def __init__(self, scratch: Scratch | None, machine: Machine, slots: Mapping[str, int], slot_bytes: int) -> None:
        """`slots`: weight that may be on disk -> its slot. `slot_bytes`: the bytes of the largest weight's slot."""
        self._scratch, self._machine, self._slots, self._slot_bytes = scratch, machine, slots, slot_bytes
        self._ring: list[Tensor] = []
        self._like: dict[str, Tensor] = {}  # without memory

    def clear(self) -> None:
        """Free the host memory of the ring."""
        self._ring.clear()
        self._like.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._like

    def add(self, name: str, weight: Tensor) -> Tensor:
        """Write `weight`, the weight called `name`, to disk. Returns a tensor of its shape and dtype without memory.
        Raises UserError "disk-failed"."""
        if not self._ring:
            sizes = [self._slot_bytes] * GRADIENT_SLOTS
            self._ring = [self._machine.host_empty((size,), torch.uint8) for size in sizes]
        self._like[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.put(name, weight)
        return self._like[name]

    def put(self, name: str, weight: Tensor) -> None:
        """Write `weight`, rounded to the working dtype, to disk as the weight called `name`. Between steps only. Raises
        UserError "disk-failed"."""
        self.own(name).copy_(weight)
        self.keep(name)

    def keep(self, name: str) -> None:
        """Write the weight called `name` from its slot to disk. Between steps only. Raises UserError "disk-failed"."""
        self.write(Item.weight(name), self._slots[name])

    def get(self, name: str) -> Tensor:
        """Read the weight called `name` from disk into its slot, where it is valid until another weight uses the slot.
        Between steps only. Raises UserError "disk-failed"."""
        self.read(Item.weight(name), self._slots[name])
        return self.own(name)

    def own(self, name: str) -> Tensor:
        """The content of the slot that belongs to the tensor `name`: its gradient, or the weight after an update."""
        return self.in_slot(name, self._slots[name])

    def in_slot(self, name: str, slot: int) -> Tensor:
        """The content of slot number `slot`, as a tensor with the shape and dtype of the weight called `name`."""
        like = self._like[name]
        return self._ring[slot - FIRST_GRADIENT_SLOT][: like.nbytes].view(like.dtype).view(like.shape)

    def write(self, item: Item, slot: int) -> None:
        """Write the weight or gradient `item` from slot number `slot` to disk. Raises UserError "disk-failed"."""
        self._kept.write(item, self._pages(item, self._ring[slot - FIRST_GRADIENT_SLOT]))

    def read(self, item: Item, slot: int) -> None:
        """Read the weight or gradient `item` from disk into slot number `slot`. Raises UserError "disk-failed"."""
        self._kept.read(item, self._pages(item, self._ring[slot - FIRST_GRADIENT_SLOT]))

    def read_into(self, item: Item, memory: Tensor) -> Tensor:
        """Read the weight or gradient `item` from disk into `memory` (bytes), which begins at a page boundary and may
        be larger. Returns the item's tensor within it. Raises UserError "disk-failed"."""
        like = self._like[item.name]
        self._kept.read(item, self._pages(item, memory))
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def _pages(self, item: Item, memory: Tensor) -> Tensor:
        size = whole_pages(self._like[item.name].nbytes)
        assert size <= memory.nbytes, (item, size, memory.nbytes)
        return memory[:size]

    @property
    def _kept(self) -> Scratch:
        if self._scratch is None:
            raise ValueError("the plan has weights on disk, and nothing was given that keeps them")
        return self._scratch

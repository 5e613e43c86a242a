"""Weights that are trained and wholly on disk: the host has neither working copy nor gradient of them. Gradients go
there through a ring of host memory and come back for their updates, which leave the working copies in the same slots.
"""

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
    """The ring, which is made when the first weight comes, and what the weights look like."""

    def __init__(self, scratch: Scratch | None, machine: Machine, slots: Mapping[str, int], slot_bytes: int) -> None:
        """`slots`: of each weight that may be there; `slot_bytes`: of the largest."""
        self._scratch, self._machine, self._slots, self._slot_bytes = scratch, machine, slots, slot_bytes
        self._ring: list[Tensor] = []
        self._like: dict[str, Tensor] = {}  # without memory

    def clear(self) -> None:
        """Let go of the memory."""
        self._ring.clear()
        self._like.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._like

    def add(self, name: str, weight: Tensor) -> Tensor:
        """Take the weight over; gives a tensor like it that has no memory. Raises UserError."""
        if not self._ring:
            sizes = [self._slot_bytes] * GRADIENT_SLOTS
            self._ring = [self._machine.host_empty((size,), torch.uint8) for size in sizes]
        self._like[name] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.put(name, weight)
        return self._like[name]

    def put(self, name: str, weight: Tensor) -> None:
        """Between steps: the weight is this one, rounded. Raises UserError."""
        self.own(name).copy_(weight)
        self.keep(name)

    def keep(self, name: str) -> None:
        """Between steps: the weight is what is in its slot. Raises UserError."""
        self.write(Item.weight(name), self._slots[name])

    def get(self, name: str) -> Tensor:
        """Between steps: the weight, in its slot, until another is there. Raises UserError."""
        self.read(Item.weight(name), self._slots[name])
        return self.own(name)

    def own(self, name: str) -> Tensor:
        """What is in the tensor's slot: its gradient, or what an update has made of the weight."""
        return self.in_slot(name, self._slots[name])

    def in_slot(self, name: str, slot: int) -> Tensor:
        """The same, of any slot."""
        like = self._like[name]
        return self._ring[slot - FIRST_GRADIENT_SLOT][: like.nbytes].view(like.dtype).view(like.shape)

    def write(self, item: Item, slot: int) -> None:
        """The item is what is in the slot. Raises UserError."""
        self._kept.write(item, self._pages(item, self._ring[slot - FIRST_GRADIENT_SLOT]))

    def read(self, item: Item, slot: int) -> None:
        """The item into the slot. Raises UserError."""
        self._kept.read(item, self._pages(item, self._ring[slot - FIRST_GRADIENT_SLOT]))

    def read_into(self, item: Item, memory: Tensor) -> Tensor:
        """The item in `memory` from a page on, which it does not fill. Raises UserError."""
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

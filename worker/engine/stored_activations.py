"""Keeps activations on disk between forward and backward. They go there and come back through a ring of slots, reused
pieces of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.schedule.items import Item
from planner.schedule.operations import ACTIVATION_SLOTS, FIRST_ACTIVATION_SLOT
from planner.schedule.state_pieces import whole_pages
from worker.engine.layouts import Layout, layouts_of
from worker.engine.stored_states import Scratch
from worker.runtime.machine import Machine
from worker.runtime.slabs import carve, slab_bytes


class StoredActivations:
    """The ring of slots (reused host memory) through which activations go to disk and back. It is allocated at its
    first use."""

    def __init__(self, scratch: Scratch | None, machine: Machine, slot_bytes: int) -> None:
        """`slot_bytes`: the bytes of the largest item. Without `scratch` nothing can be written or read."""
        self._scratch, self._machine, self._slot_bytes = scratch, machine, slot_bytes
        self._ring: list[Tensor] = []
        self._layouts: dict[str, list[Layout]] = {}

    def clear(self) -> None:
        """Free the host memory of the ring."""
        self._ring.clear()
        self._layouts.clear()

    def park(self, item: Item, slot: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors in `slot` with the shapes, strides and dtypes of `tensors`, for the activations `item` on their
        way to disk."""
        if not self._ring:
            slots = range(ACTIVATION_SLOTS)
            self._ring = [self._machine.host_empty((self._slot_bytes,), torch.uint8) for _ in slots]
        self._layouts[item] = layouts_of(tensors)
        return self.in_slot(item, slot)

    def in_slot(self, item: Item, slot: int) -> list[Tensor]:
        """The tensors of the activations `item`, which are in `slot` now."""
        layouts = self._layouts[item]
        parts = carve(self._used(item, slot), [layout.bytes for layout in layouts])
        return [layout.within(part) for layout, part in zip(layouts, parts, strict=True)]

    def write(self, item: Item, slot: int) -> None:
        """Write the activations `item` from `slot` (reused host memory) to disk. Raises UserError "disk-failed"."""
        self._kept.write(item, self._used(item, slot))

    def read(self, item: Item, slot: int) -> None:
        """Read the activations `item` from disk into `slot` (reused host memory). Raises UserError "disk-failed"."""
        self._kept.read(item, self._used(item, slot))

    def _used(self, item: Item, slot: int) -> Tensor:
        size = whole_pages(slab_bytes([layout.bytes for layout in self._layouts[item]]))
        memory = self._ring[slot - FIRST_ACTIVATION_SLOT]
        assert size <= memory.nbytes, (item, size, memory.nbytes)
        return memory[:size]

    @property
    def _kept(self) -> Scratch:
        if self._scratch is None:
            raise ValueError("the plan has activations on disk, and nothing was given that keeps them")
        return self._scratch

"""Holds the weights, gradients, optimizer states and activations that have a copy on the device, and copies them to and
from the host."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.schedule.items import ACTIVATIONS, WEIGHT, Item
from worker.engine.host_items import Host
from worker.engine.layouts import copy


class Device:
    """The copies on the device. An item is what moves as one: a weight, its gradient, its optimizer states, or a
    block's activations; its copy is a list of tensors as in `Host`. Only the thread that computes allocates and frees;
    other queues only copy, between an item's allocation and its release.

    items       item -> its tensors
    empty       items that are allocated but not fetched yet
    """

    def __init__(self, host: Host, device: torch.device) -> None:
        self.items: dict[Item, list[Tensor]] = {}
        self.empty: set[Item] = set()
        self.type = device.type
        self.constants: object = None  # what updates read beside the items (`Optimizer.constants`)
        self._host, self._device = host, device

    def allocate(self, *items: Item) -> None:
        """Allocate device memory for the items, with the shapes, strides and dtypes of their copies on the host."""
        for item in items:
            assert item not in self.items, item
            self.items[item] = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self._device)
                for t in self._host.items[item]
            ]
            self.empty.add(item)

    def free(self, *items: Item) -> None:
        """Free the items' memory on the device."""
        for item in items:
            del self.items[item]
        self.empty.difference_update(items)

    def fetch(self, *items: Item) -> None:
        """Copy the items from their host memory to the device, where their memory is allocated already."""
        host, targets, sources = self._host, list[Tensor](), list[Tensor]()
        for item in items:
            if host.is_wholly_on_disk(item.name):  # between steps: the next one may overwrite its slot
                for target, source in zip(self.items[item], host.copies(item), strict=True):
                    target.copy_(source)
            else:
                targets += self.items[item]
                sources += host.items[item]
        copy(targets, sources)
        self.empty.difference_update(items)

    def fetch_from(self, slot: int, item: Item) -> None:
        """Copy `item` to the device from `slot`, a reused piece of host memory into which it was read from disk."""
        host = self._host
        if item.kind == ACTIVATIONS:
            sources = host.stored.in_slot(item, slot)
        else:
            sources = [host.in_slot(item, slot) if item.kind == WEIGHT else host.weights.in_slot(item.name, slot)]
        copy(self.items[item], sources)
        self.empty.discard(item)

    def send(self, *items: Item) -> None:
        """Copy the items from the device to their host memory."""
        targets, sources = list[Tensor](), list[Tensor]()
        for item in items:
            its = self.items[item]
            targets += self._host.park(item, its) if item.kind == ACTIVATIONS else self._host.items[item]
            sources += its
        copy(targets, sources)

    def send_to(self, slot: int, item: Item) -> None:
        """Copy `item` from the device to `slot`, a reused piece of host memory from which it is then written to
        disk."""
        host, sources = self._host, self.items[item]
        if item.kind == ACTIVATIONS:
            targets = host.items[item] = host.stored.park(item, slot, sources)
        else:
            targets = [host.weights.in_slot(item.name, slot)]
        copy(targets, sources)

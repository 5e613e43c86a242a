"""What has a copy in host memory: working copies, optimizer states, gradients, offloaded activations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from planner.cpu.packed import pack, unpack
from planner.optimizers.base import Optimizer
from planner.optimizers.table import ADAMW
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.operations import SLOTS
from worker.engine.file_items import FileItems
from worker.engine.layouts import Layout, layouts_of
from worker.engine.stored_activations import StoredActivations
from worker.engine.stored_weights import StoredWeights
from worker.runtime.machine import Machine
from worker.runtime.slabs import carve, slab_bytes


class Host:
    """Host copies by item: of a weight one tensor, of a gradient one; of states the moments and, where the weights are
    narrower than fp32, one more (the master, or where states are packed its lower half); of activations as many as the
    block saved. Only what the program moves or updates on the CPU is here."""

    def __init__(self, machine: Machine, weights: StoredWeights, activations: StoredActivations | None = None) -> None:
        """`weights`: those that are wholly on disk; `activations`: those that go on to disk."""
        self.activations, self.weights = activations, weights
        self.items: dict[Item, list[Tensor]] = {}
        self._machine = machine
        self._parked: dict[str, Tensor] = {}
        self._layouts: dict[str, list[Layout]] = {}  # of what is parked
        self._spare: dict[Item, list[Tensor]] = {}
        self._files = FileItems()
        self._slots: list[Tensor] = []  # the ring through which weights come from files
        self._in_slots: dict[int, tuple[str, Tensor]] = {}
        self._masters: dict[str, Tensor] = {}  # memory for those of packed states: that of gradient and lower half

    def clear(self) -> None:
        """Let go of all of it."""
        for kept in (self.items, self._parked, self._layouts, self._spare, self._masters, self._in_slots):
            kept.clear()
        self.weights.clear()
        if self.activations is not None:
            self.activations.clear()
        self._slots, self._files = [], FileItems()

    def swap(self, item: Item) -> list[Tensor]:
        """Put other memory in the place of the item's, laid out alike and with any content; gives what it was, which is
        kept until the next call."""
        old = self.items[item]
        if item not in self._spare:
            self._spare[item] = [self._machine.host_empty(t.shape, t.dtype) for t in old]
        self.items[item], self._spare[item] = self._spare[item], old
        return old

    def before(self, item: Item) -> list[Tensor]:
        """What the item was before its last `swap`."""
        return self._spare[item]

    def hold(
        self, name: str, kinds: Collection[str], weight: Tensor, *, overwritten: bool = False, packed: bool = False,
        optimizer: Optimizer = ADAMW,
    ) -> None:  # fmt: skip
        """Give a tensor's items of these kinds their memory, one slab for all, and what is in them
        before the first step. `overwritten`: the gradient takes the weight's place; `packed`: the states are."""
        wanted = [(WEIGHT, weight.dtype, weight.shape)] * (WEIGHT in kinds)
        wanted += [(GRADIENT, weight.dtype, weight.shape)] * (GRADIENT in kinds and not overwritten and not packed)
        wanted += [(STATES, *layout) for layout in _state_layouts(weight, optimizer)] * (STATES in kinds)
        sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in wanted]
        slab = self._machine.host_empty((slab_bytes(sizes),), torch.uint8)
        for (kind, dtype, shape), part in zip(wanted, carve(slab, sizes), strict=True):
            self.items.setdefault(Item.of(kind, name), []).append(part.view(dtype).view(shape))
        if WEIGHT in kinds:
            self.items[Item.weight(name)][0].copy_(weight)
        if GRADIENT in kinds and overwritten:
            self.items[Item.gradient(name)] = self.items[Item.weight(name)]
        if packed:  # a master that is its working copy has nothing in its lower half
            states = self.items[Item.states(name)]
            self._masters[name] = states[2]
            gradient, states[2] = (half.view(weight.shape) for half in states[2].view(-1).view(torch.int16).chunk(2))
            self.items[Item.gradient(name)] = [gradient.view(weight.dtype)]
        elif STATES in kinds:
            for master in self.items[Item.states(name)][len(optimizer.moments) :]:
                master.copy_(weight)

    def leave_on_disk(self, name: str, weight: Tensor, slot_bytes: int) -> None:
        """Let a weight be read from the file that its memory is mapped from, whenever it is fetched. Raises UserError
        "weights-not-in-files"."""
        self.items[Item.weight(name)] = [weight]  # still mapped: nothing is read before somebody looks
        self._make_slots(slot_bytes)
        self._files.add(Item.weight(name), weight)

    def move_to_disk(self, name: str, weight: Tensor, slot_bytes: int) -> None:
        """Have a weight and its gradients on disk, and of neither a copy. Raises UserError "disk-failed"."""
        self._make_slots(slot_bytes)
        like = self.weights.add(name, weight)
        self.items |= {Item.weight(name): [like], Item.gradient(name): [like]}

    def _make_slots(self, slot_bytes: int) -> None:
        if not self._slots:
            self._slots = [self._machine.host_empty((slot_bytes,), torch.uint8) for _ in range(SLOTS)]

    def is_mapped(self, item: Item) -> bool:
        """Whether the item is the memory of a file."""
        return item in self._files

    def is_wholly_on_disk(self, name: str) -> bool:
        """Whether of the tensor's items none is here."""
        return name in self.weights

    def copies(self, item: Item) -> list[Tensor]:
        """Between steps: the item's tensors; where it is on disk in a slot, until another is there. Raises
        UserError."""
        return [self.weights.get(item.name)] if item.name in self.weights else self.items[item]

    def read(self, item: Item, slot: int) -> None:
        """From its file, or its drive, into a slot. Raises UserError "disk-failed"."""
        memory = self._slots[slot]
        if item.name in self.weights:
            self._in_slots[slot] = item, self.weights.read_into(item, memory)
        else:
            self._in_slots[slot] = item, self._files.read(item, memory)

    def in_slot(self, item: Item, slot: int) -> Tensor:
        """What was read there."""
        there, weight = self._in_slots[slot]
        assert there == item, (there, item)
        return weight

    @property
    def stored(self) -> StoredActivations:
        """The activations that go on to disk, of which there are some."""
        assert self.activations is not None
        return self.activations

    def is_packed(self, name: str) -> bool:
        """Whether of the tensor's master only the lower half is here."""
        return name in self._masters

    @contextmanager
    def whole_states(self, name: str) -> Iterator[list[Tensor]]:
        """Inside, the tensor's states as they are where they are not packed, to be read and written; afterwards the
        working copy is the master's rounding. Between steps only: packed ones take the gradient's memory for it."""
        states = self.items[Item.states(name)]
        if not self.is_packed(name):
            yield states
            return
        (work,), (exp_avg, exp_avg_sq, low) = self.items[Item.weight(name)], states
        spare = self._spare.get(Item.states(name))  # that of the gradient is beside the lower half that came first
        master = self._masters[name] if spare is None else spare[0]
        unpack(work, low, exp_avg_sq, master)
        try:
            yield [exp_avg, exp_avg_sq, master]
        finally:
            pack(master, work, low, exp_avg_sq)

    def is_parked(self, item: Item, tensors: Sequence[Tensor]) -> bool:
        """Whether `park` has memory for them: making it takes time, and letting go of a smaller one waits."""
        return self._layouts.get(item) == layouts_of(tensors)

    def park(self, item: Item, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the layouts of `tensors`. They are kept: in the next step those of the same item mostly lie
        alike."""
        layouts = layouts_of(tensors)
        if self._layouts.get(item) != layouts:
            sizes = [layout.bytes for layout in layouts]
            slab = self._parked.get(item)
            if slab is None or slab.nbytes < slab_bytes(sizes):
                slab = self._parked[item] = self._machine.host_empty((slab_bytes(sizes),), torch.uint8)
            parts = carve(slab, sizes)
            self.items[item] = [layout.within(part) for layout, part in zip(layouts, parts, strict=True)]
            self._layouts[item] = layouts
        return self.items[item]


def new_states(weight: Tensor, optimizer: Optimizer) -> list[Tensor]:
    """Optimizer states of `weight` before the first step, on its device: zero moments and, where it is narrower than
    fp32, the master."""
    layouts = _state_layouts(weight, optimizer)
    states = [torch.zeros(shape, dtype=dtype, device=weight.device) for dtype, shape in layouts]
    for master in states[len(optimizer.moments) :]:
        master.copy_(weight)
    return states


def _state_layouts(weight: Tensor, optimizer: Optimizer) -> list[tuple[torch.dtype, torch.Size]]:
    master = [(torch.float32, weight.shape)] * (weight.dtype != torch.float32)
    return optimizer.moment_layouts(weight) + master

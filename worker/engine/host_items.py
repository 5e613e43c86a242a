"""Holds the items that have a copy in host memory: working copies, optimizer states, gradients, activations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.cpu.direct import OpenFile, mapped_at
from planner.cpu.packed import pack, unpack
from planner.errors import UserError, first_line
from planner.optimizers.base import Optimizer
from planner.optimizers.table import ADAMW
from planner.schedule.items import GRADIENT, STATES, WEIGHT, Item
from planner.schedule.operations import SLOTS
from worker.engine.layouts import Layout, layouts_of
from worker.engine.stored_activations import StoredActivations
from worker.engine.stored_weights import StoredWeights
from worker.runtime.machine import Machine
from worker.runtime.slabs import carve, slab_bytes


class Host:
    """Host copies by item, only of items that the program moves or updates on the CPU. A weight or a gradient has one
    tensor. States have the moments and, where the weight is narrower than fp32, one more: the master, or, where states
    are packed, its lower half. Activations have as many as the block saved."""

    def __init__(self, machine: Machine, weights: StoredWeights, activations: StoredActivations | None = None) -> None:
        """`weights` keeps those that are wholly on disk, `activations` those that go on to disk."""
        self.activations, self.weights = activations, weights
        self.items: dict[Item, list[Tensor]] = {}
        self._machine = machine
        self._parked: dict[str, Tensor] = {}
        self._layouts: dict[str, list[Layout]] = {}  # of parked activations
        self._spare: dict[Item, list[Tensor]] = {}
        self._files = FileItems()
        self._slots: list[Tensor] = []  # the ring through which weights come from files
        self._in_slots: dict[int, tuple[str, Tensor]] = {}
        self._masters: dict[str, Tensor] = {}  # of packed states: memory that gradient and lower half share

    def clear(self) -> None:
        """Free all host copies."""
        for table in (self.items, self._parked, self._layouts, self._spare, self._masters, self._in_slots):
            table.clear()
        self.weights.clear()
        if self.activations is not None:
            self.activations.clear()
        self._slots, self._files = [], FileItems()

    def swap(self, item: Item) -> list[Tensor]:
        """Replace the item's tensors by others of the same layout, with any content. Returns the old ones, which are
        kept until the next call."""
        old = self.items[item]
        if item not in self._spare:
            self._spare[item] = [self._machine.host_empty(t.shape, t.dtype) for t in old]
        self.items[item], self._spare[item] = self._spare[item], old
        return old

    def before(self, item: Item) -> list[Tensor]:
        """The item's tensors before its last `swap`."""
        return self._spare[item]

    def hold(
        self,
        name: str,
        kinds: Collection[str],
        weight: Tensor,
        *,
        overwritten: bool = False,
        packed: bool = False,
        optimizer: Optimizer = ADAMW,
    ) -> None:
        """Allocate a tensor's items of these kinds in one slab, and fill them with their content before the first
        step. `overwritten`: the gradient overwrites the weight's working copy. `packed`: the states are packed."""
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
        if packed:  # the master equals its working copy, so its lower half is zero
            states = self.items[Item.states(name)]
            self._masters[name] = states[2]
            gradient, states[2] = (half.view(weight.shape) for half in states[2].view(-1).view(torch.int16).chunk(2))
            self.items[Item.gradient(name)] = [gradient.view(weight.dtype)]
        elif STATES in kinds:
            for master in self.items[Item.states(name)][len(optimizer.moments) :]:
                master.copy_(weight)

    def leave_on_disk(self, name: str, weight: Tensor, slot_bytes: int) -> None:
        """Leave a weight in the file that its memory is mapped from, to be read from there whenever it is fetched.
        Raises UserError "weights-not-in-files"."""
        self.items[Item.weight(name)] = [weight]  # still mapped: nothing is read until it is accessed
        self._make_slots(slot_bytes)
        self._files.add(Item.weight(name), weight)

    def move_to_disk(self, name: str, weight: Tensor, slot_bytes: int) -> None:
        """Keep a weight and its gradient on disk, without a host copy of either. Raises UserError "disk-failed"."""
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
        """Whether the tensor's items are all on disk, and none in host memory."""
        return name in self.weights

    def copies(self, item: Item) -> list[Tensor]:
        """The item's tensors, between steps. An item on disk is read into a slot and stays there until the slot is used
        again. Raises UserError."""
        return [self.weights.get(item.name)] if item.name in self.weights else self.items[item]

    def read(self, item: Item, slot: int) -> None:
        """Read the item into a slot, from its model file or its drive. Raises UserError "disk-failed"."""
        memory = self._slots[slot]
        if item.name in self.weights:
            self._in_slots[slot] = item, self.weights.read_into(item, memory)
        else:
            self._in_slots[slot] = item, self._files.read(item, memory)

    def in_slot(self, item: Item, slot: int) -> Tensor:
        """The item that was read into the slot."""
        held, weight = self._in_slots[slot]
        assert held == item, (held, item)
        return weight

    @property
    def stored(self) -> StoredActivations:
        """The keeper of activations that go on to disk. The plan must have some."""
        assert self.activations is not None
        return self.activations

    def is_packed(self, name: str) -> bool:
        """Whether the tensor's states are packed: of its master they hold only the lower half."""
        return name in self._masters

    @contextmanager
    def whole_states(self, name: str) -> Iterator[list[Tensor]]:
        """Inside, the tensor's states in unpacked form, to be read and written. Afterwards packed states are packed
        again, and the working copy is the rounded master. Between steps only: unpacking takes the gradient's memory."""
        states = self.items[Item.states(name)]
        if not self.is_packed(name):
            yield states
            return
        (work,), (exp_avg, exp_avg_sq, low) = self.items[Item.weight(name)], states
        spare = self._spare.get(Item.states(name))  # the gradient's memory lies beside the original lower half
        master = self._masters[name] if spare is None else spare[0]
        unpack(work, low, exp_avg_sq, master)
        try:
            yield [exp_avg, exp_avg_sq, master]
        finally:
            pack(master, work, low, exp_avg_sq)

    def is_parked(self, item: Item, tensors: Sequence[Tensor]) -> bool:
        """Whether `park` has memory for them already: allocating takes time, and freeing a smaller slab waits."""
        return self._layouts.get(item) == layouts_of(tensors)

    def park(self, item: Item, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the layouts of `tensors`. They are kept, because in the next step the item mostly has the
        same layouts."""
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
    """The optimizer states of `weight` before the first step, on its device: moments of zero and, where the weight is
    narrower than fp32, the master."""
    layouts = _state_layouts(weight, optimizer)
    states = [torch.zeros(shape, dtype=dtype, device=weight.device) for dtype, shape in layouts]
    for master in states[len(optimizer.moments) :]:
        master.copy_(weight)
    return states


def _state_layouts(weight: Tensor, optimizer: Optimizer) -> list[tuple[torch.dtype, torch.Size]]:
    master = [(torch.float32, weight.shape)] * (weight.dtype != torch.float32)
    return optimizer.moment_layouts(weight) + master


# ---- reads frozen weights that stay in the model's own files, each time they are fetched


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    file: OpenFile
    offset: int
    bytes: int
    dtype: torch.dtype
    shape: torch.Size


class FileItems:
    """Knows where, and in which file, each item's bytes are. Files are opened once, read-only, and stay open: if a file
    is replaced under its name, the old one is still read."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._files: dict[Path, OpenFile] = {}

    def __contains__(self, item: Item) -> bool:
        return item in self._parts

    def add(self, item: Item, weight: Tensor) -> None:
        """Register the item: the contiguous `weight`, whose memory is mapped from a file. Raises UserError
        "weights-not-in-files", "disk-failed"."""
        mapping = mapped_at(weight)
        if mapping is None or mapping[1] % weight.element_size():
            raise UserError(
                f"{item.name} cannot be read from the model's files as it is in memory.",
                code="weights-not-in-files",
                numbers=("it was converted when the model was loaded, or its file was replaced since",),
                hint="offmate retry; where that is no help, a larger cpu_budget",
            )
        path, offset = mapping
        try:
            file = self._files.setdefault(path, self._files.get(path) or OpenFile(path))
        except OSError as error:
            raise _failed(path, error) from error
        self._parts[item] = _Part(file, offset, weight.nbytes, weight.dtype, weight.shape)

    def read(self, item: Item, memory: Tensor) -> Tensor:
        """Read the item into `memory`, which must be larger. Returns the item's part of it. Raises UserError
        "disk-failed"."""
        part = self._parts[item]
        try:
            return part.file.read(part.offset, part.bytes, memory).view(part.dtype).view(part.shape)
        except OSError as error:
            raise _failed(part.file.path, error) from error


def _failed(path: Path, error: OSError) -> UserError:
    return UserError(
        "The model's weights cannot be read from disk any more.",
        code="disk-failed",
        numbers=(f"{path}: {first_line(error)}",),
        hint="see to the disk; the job goes on from its last checkpoint: offmate retry",
    )

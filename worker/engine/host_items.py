"""Holds the weights (working copies), optimizer states, gradients and activations that have a copy in host memory."""

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
    """The copies in host memory, by item: what moves as one, such as a weight, its gradient, its optimizer states, or a
    block's activations. There is a copy only of items that the program moves or updates on the CPU. A weight or a
    gradient has one tensor. States have the moments and, where the weight is narrower than fp32, one more: the fp32
    master or, where states are packed, its lower 16 bits. Activations have as many tensors as the block saved."""

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
        """Free the host memory of all items."""
        for table in (self.items, self._parked, self._layouts, self._spare, self._masters, self._in_slots):
            table.clear()
        self.weights.clear()
        if self.activations is not None:
            self.activations.clear()
        self._slots, self._files = [], FileItems()

    def swap(self, item: Item) -> list[Tensor]:
        """Give the item other host tensors of the same shapes, strides and dtypes, with undefined content. Returns the
        old tensors, which are kept until the next call."""
        old = self.items[item]
        if item not in self._spare:
            self._spare[item] = [self._machine.host_empty(t.shape, t.dtype) for t in old]
        self.items[item], self._spare[item] = self._spare[item], old
        return old

    def before(self, item: Item) -> list[Tensor]:
        """The host tensors that the item had before its last `swap`."""
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
        """Allocate the host copies of these `kinds` (weight, gradient, states) for the tensor `name`, in one piece of
        memory, and fill them with their content before the first step, which follows from `weight`. `overwritten`: the
        gradient uses the memory of the weight's working copy. `packed`: states keep only the lower half of the fp32
        master; its upper half follows from the bf16 working copy (`planner.cpu.packed`)."""
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
        """Keep no host copy of the frozen tensor `name`: whenever it is fetched, it is read from the model file that
        the memory of `weight` is mapped from. `slot_bytes`: the size of the reused host memory into which it is read.
        Raises UserError "weights-not-in-files"."""
        self.items[Item.weight(name)] = [weight]  # still mapped: nothing is read until it is accessed
        self._make_slots(slot_bytes)
        self._files.add(Item.weight(name), weight)

    def move_to_disk(self, name: str, weight: Tensor, slot_bytes: int) -> None:
        """Keep the trained tensor `name` and its gradient on disk, with no host copy of either. `slot_bytes`: the size
        of the reused host memory through which they go. Raises UserError "disk-failed"."""
        self._make_slots(slot_bytes)
        like = self.weights.add(name, weight)
        self.items |= {Item.weight(name): [like], Item.gradient(name): [like]}

    def _make_slots(self, slot_bytes: int) -> None:
        if not self._slots:
            self._slots = [self._machine.host_empty((slot_bytes,), torch.uint8) for _ in range(SLOTS)]

    def is_mapped(self, item: Item) -> bool:
        """Whether the item's host memory is mapped from a model file."""
        return item in self._files

    def is_wholly_on_disk(self, name: str) -> bool:
        """Whether the weight, gradient and states of the tensor `name` are all on disk, and none in host memory."""
        return name in self.weights

    def copies(self, item: Item) -> list[Tensor]:
        """The item's host tensors, to be used between steps. An item on disk is first read into a slot, a reused piece
        of host memory, and is valid until the slot is used again. Raises UserError "disk-failed"."""
        return [self.weights.get(item.name)] if item.name in self.weights else self.items[item]

    def read(self, item: Item, slot: int) -> None:
        """Read the item from its model file or its drive into `slot`, a reused piece of host memory. Raises UserError
        "disk-failed"."""
        memory = self._slots[slot]
        if item.name in self.weights:
            self._in_slots[slot] = item, self.weights.read_into(item, memory)
        else:
            self._in_slots[slot] = item, self._files.read(item, memory)

    def in_slot(self, item: Item, slot: int) -> Tensor:
        """The tensor of the item that was read into `slot`, a reused piece of host memory."""
        held, weight = self._in_slots[slot]
        assert held == item, (held, item)
        return weight

    @property
    def stored(self) -> StoredActivations:
        """The keeper of the activations that the plan writes to disk. The plan must have some."""
        assert self.activations is not None
        return self.activations

    def is_packed(self, name: str) -> bool:
        """Whether the optimizer states of the tensor `name` are packed: of the fp32 master they hold only the lower
        half, while its upper half follows from the bf16 working copy (`planner.cpu.packed`)."""
        return name in self._masters

    @contextmanager
    def whole_states(self, name: str) -> Iterator[list[Tensor]]:
        """A context that gives the optimizer states of the tensor `name` unpacked, with the full fp32 master, to be
        read and written. On leaving, packed states are packed again, and the working copy becomes the rounded master.
        Use it between steps only: unpacking uses the gradient's memory."""
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
        """Whether `park` has host memory of the right size for these activations already. If not, `park` must allocate,
        and freeing the smaller memory waits for the device."""
        return self._layouts.get(item) == layouts_of(tensors)

    def park(self, item: Item, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Host tensors with the shapes, strides and dtypes of `tensors`, for offloading the activations `item`. Their
        memory is kept for the next step, in which the item mostly looks the same."""
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
    """The optimizer states of `weight` before the first step, on the same device: moments of zero and, where the weight
    is narrower than fp32, an fp32 master with the weight's values."""
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
    """Reads frozen weights from the files of the model: knows in which file, and where in it, the bytes of each weight
    are. Files are opened once, read-only, and stay open: if a file is replaced under its name, the old one is still
    read."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}
        self._files: dict[Path, OpenFile] = {}

    def __contains__(self, item: Item) -> bool:
        return item in self._parts

    def add(self, item: Item, weight: Tensor) -> None:
        """Register the item, whose contiguous tensor `weight` is in memory mapped from a file. Raises UserError
        "weights-not-in-files" if it is not, and "disk-failed" if the file cannot be opened."""
        mapping = mapped_at(weight)
        if mapping is None or mapping[1] % weight.element_size():
            raise UserError(
                f"{item.name} cannot be read from the model's files: in memory the weight is not as it is in them.",
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
        """Read the item from its file into `memory` (bytes), which must be larger than the item. Returns the part of it
        that holds the item. Raises UserError "disk-failed"."""
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
        hint="check the disk; the job goes on from its last checkpoint: offmate retry",
    )

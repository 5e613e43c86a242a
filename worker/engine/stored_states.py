"""Moves pieces of optimizer states that are on disk through a ring of host memory, in which they are updated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.schedule.items import Item
from planner.schedule.operations import SLOTS, STATE_SLOTS
from planner.schedule.state_pieces import PARTS, Piece
from worker.runtime.machine import Machine


class Store(Protocol):
    """What keeps the states on disk: see worker.storage.states.StatesOnDisk. `homes`: of each piece, 2 where
    checkpoints only name the pieces. `resumed`: whether the states of the last checkpoint are there."""

    @property
    def homes(self) -> int: ...
    @property
    def resumed(self) -> bool: ...
    @property
    def pieces(self) -> Sequence[Piece]: ...
    def read(self, name: str, piece: int, memory: Tensor) -> None: ...
    def write(self, name: str, piece: int, memory: Tensor) -> None: ...
    def parts(self, name: str, piece: int, memory: Tensor) -> list[Tensor]: ...
    def streamed(self, name: str, memory: Tensor, others: Mapping[str, Tensor]) -> Any: ...
    def written(self, name: str, memory: Tensor, dtype: torch.dtype) -> Any: ...
    def check(self, memory: Tensor) -> Iterator[tuple[Piece, list[Tensor]]]: ...


class Scratch(Protocol):
    """What keeps on disk activations between their forward and backward, weights that are wholly on disk, and the
    gradients of these weights: see worker.storage.activations."""

    def write(self, item: Item, memory: Tensor) -> None: ...
    def read(self, item: Item, memory: Tensor) -> None: ...


class StoredStates:
    """The states of some tensors in a store. Between steps every read and write goes through the ring's first slot."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self.store = store
        size = max(piece.bytes for piece in store.pieces)
        self._slots = [machine.host_empty((size,), torch.uint8) for _ in range(STATE_SLOTS)]
        self._pieces: dict[str, list[Piece]] = {}
        for piece in store.pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    @property
    def resumed(self) -> bool:
        """Whether the store has the states of the last checkpoint."""
        return self.store.resumed

    @property
    def ring(self) -> Sequence[Tensor]:
        """The ring's slots."""
        return self._slots

    def read(self, name: str, piece: int, slot: int) -> None:
        """Read a piece into a slot. Raises UserError."""
        self.store.read(name, piece, self._slots[slot - SLOTS])

    def write(self, name: str, piece: int, slot: int) -> None:
        """Write the piece that is in a slot. Raises UserError."""
        self.store.write(name, piece, self._slots[slot - SLOTS])

    def in_slot(self, name: str, piece: int, slot: int) -> tuple[Piece, list[Tensor]]:
        """A piece, and its states as they are in the slot, flat."""
        return self._pieces[name][piece], self.store.parts(name, piece, self._slots[slot - SLOTS])

    def begin(self, name: str, weight: Tensor) -> None:
        """Before the first step: write moments of zero, and the weight as master. Raises UserError."""
        self._put(name, {"master": weight.reshape(-1)})

    def _put(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Write the states; what is not among the flat `parts` is zero."""
        memory = self._slots[0]
        for piece in self._pieces[name]:
            memory.zero_()
            for part, target in zip(PARTS, self.store.parts(name, piece.number, memory), strict=False):
                if part in parts:
                    target.copy_(parts[part][piece.first : piece.first + piece.elements])
            self.store.write(name, piece.number, memory)

    def load(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Write a tensor's states, given by the names in PARTS. Raises UserError."""
        self._put(name, {part: parts[part].reshape(-1) for part in PARTS})

    def streamed(self, name: str, others: Mapping[str, Tensor]) -> Any:
        """What the store gives for a checkpoint that is a copy: the states, together with `others`."""
        return self.store.streamed(name, self._slots[0], others)

    def written(self, name: str, dtype: torch.dtype) -> Any:
        """What the store gives for a model folder: the master, rounded to `dtype`."""
        return self.store.written(name, self._slots[0], dtype)

    def whole(self, name: str, like: Tensor) -> list[Tensor]:
        """The states, read into new memory, in the shape of `like`. Raises UserError."""
        first = self._pieces[name][0]
        states = [torch.empty(like.shape, dtype=torch.float32) for _ in first.widths]
        for piece, parts in self._read_all(name):
            for state, part in zip(states, parts, strict=True):
                state.view(-1)[piece.first : piece.first + piece.elements] = part
        return states

    def make_anew(self, name: str, work: Tensor) -> None:
        """Round the working copy from the master again, if the states have a master. Raises UserError."""
        if len(self._pieces[name][0].widths) > 2:
            for piece, parts in self._read_all(name):
                work.view(-1)[piece.first : piece.first + piece.elements] = parts[2]

    def _read_all(self, name: str) -> Iterator[tuple[Piece, list[Tensor]]]:
        for piece in self._pieces[name]:
            self.store.read(name, piece.number, self._slots[0])
            yield piece, self.store.parts(name, piece.number, self._slots[0])

    def masters_taken_over(self) -> Iterator[tuple[Piece, Tensor]]:
        """(piece, its master) of the checkpoint that the store has resumed, tensor by tensor. All states are checked,
        also those without a master, which give nothing. Raises UserError."""
        for piece, parts in self.store.check(self._slots[0]):
            if len(parts) > 2:
                yield piece, parts[2]

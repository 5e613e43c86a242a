"""Moves optimizer states that are on disk through a ring of slots, reused pieces of host memory in which they are
updated. A tensor's states move in pieces, ranges of its elements that fit a slot."""

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
    """The interface of what keeps optimizer states on disk: see worker.storage.states.StatesOnDisk. `homes`: the number
    of places on disk of each piece of states; 2 where checkpoints name the pieces in place of copying them. `resumed`:
    whether the states of the last checkpoint are there."""

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
    """The interface of what keeps on disk, for the time of a run, activations between forward and backward, weights
    that are wholly on disk, and the gradients of these weights: see worker.storage.activations."""

    def write(self, item: Item, memory: Tensor) -> None: ...
    def read(self, item: Item, memory: Tensor) -> None: ...


class StoredStates:
    """The optimizer states of those tensors whose states are on disk. During a step they go through all slots of the
    ring; between steps every read and write uses the first slot."""

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
        """Whether the states on disk are already those of the last checkpoint, so that they need not be loaded."""
        return self.store.resumed

    @property
    def ring(self) -> Sequence[Tensor]:
        """The slots: pieces of host memory, used again and again, through which states go."""
        return self._slots

    def read(self, name: str, piece: int, slot: int) -> None:
        """Read piece number `piece` of the states of the tensor `name` from disk into `slot`. Raises UserError
        "disk-failed"."""
        self.store.read(name, piece, self._slots[slot - SLOTS])

    def write(self, name: str, piece: int, slot: int) -> None:
        """Write piece number `piece` of the states of the tensor `name` from `slot` to disk. Raises UserError
        "disk-failed"."""
        self.store.write(name, piece, self._slots[slot - SLOTS])

    def in_slot(self, name: str, piece: int, slot: int) -> tuple[Piece, list[Tensor]]:
        """(piece number `piece` of the tensor `name`, its moments and master as flat tensors in `slot`). The piece must
        have been read into the slot."""
        return self._pieces[name][piece], self.store.parts(name, piece, self._slots[slot - SLOTS])

    def begin(self, name: str, weight: Tensor) -> None:
        """Write the states of the tensor `name` before the first step to disk: moments of zero, and `weight` as the
        fp32 master. Raises UserError "disk-failed"."""
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
        """Write the states of the tensor `name` to disk. `parts`: state (one of the names in PARTS) -> tensor. Raises
        UserError "disk-failed"."""
        self._put(name, {part: parts[part].reshape(-1) for part in PARTS})

    def streamed(self, name: str, others: Mapping[str, Tensor]) -> Any:
        """The entry for the tensor `name` in a checkpoint that copies states: an object from which they are read piece
        by piece, together with the tensors `others`."""
        return self.store.streamed(name, self._slots[0], others)

    def written(self, name: str, dtype: torch.dtype) -> Any:
        """The entry for the tensor `name` in a model folder: an object from which the fp32 master is read piece by
        piece, rounded to `dtype`."""
        return self.store.written(name, self._slots[0], dtype)

    def whole(self, name: str, like: Tensor) -> list[Tensor]:
        """All states of the tensor `name`, read from disk into new memory, in the shape of `like`. Raises UserError
        "disk-failed"."""
        first = self._pieces[name][0]
        states = [torch.empty(like.shape, dtype=torch.float32) for _ in first.widths]
        for piece, parts in self._read_all(name):
            for state, part in zip(states, parts, strict=True):
                state.view(-1)[piece.first : piece.first + piece.elements] = part
        return states

    def make_anew(self, name: str, work: Tensor) -> None:
        """Fill the working copy `work` of the tensor `name` with its fp32 master, rounded. Does nothing if the states
        have no master. Raises UserError "disk-failed"."""
        if len(self._pieces[name][0].widths) > 2:
            for piece, parts in self._read_all(name):
                work.view(-1)[piece.first : piece.first + piece.elements] = parts[2]

    def _read_all(self, name: str) -> Iterator[tuple[Piece, list[Tensor]]]:
        for piece in self._pieces[name]:
            self.store.read(name, piece.number, self._slots[0])
            yield piece, self.store.parts(name, piece.number, self._slots[0])

    def masters_taken_over(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield (piece, its part of the fp32 master) for the states of the checkpoint that the run resumes from, tensor
        by tensor. All states are compared with their checksums, also those of tensors without a master, for which
        nothing is yielded. Raises UserError "states-torn", "disk-failed"."""
        for piece, parts in self.store.check(self._slots[0]):
            if len(parts) > 2:
                yield piece, parts[2]

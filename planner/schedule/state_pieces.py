"""Defines the pieces in which optimizer states on disk are read, updated and written, and computes their bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

PAGE = 4096
PARTS = ("exp_avg", "exp_avg_sq", "master")
LEAST_BYTES = 2**20
"""Optimizer states of fewer bytes than this stay in memory, because a drive takes nearly as long for them as for this
many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor's optimizer states on disk: piece `number` of the flattened tensor `name`, with `elements`
    elements from element `first` on. `widths`: bytes per element of each state. The states lie one after the other:
    exp_avg, exp_avg_sq and, if the weights are narrower than fp32, the master."""

    name: str
    number: int
    first: int
    elements: int
    widths: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the piece in memory and in the file, rounded up to whole pages."""
        return whole_pages(self.elements * sum(self.widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor whose optimizer states are on disk. `widths`: bytes per element of each state."""

    name: str
    shape: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the tensor's optimizer states, in the order in which they lie on disk."""
        return PARTS[: len(self.widths)]

    def pieces(self, piece_elements: int) -> tuple[Piece, ...]:
        """The pieces of the tensor's states, in order. All but the last have `piece_elements` elements. This must be a
        multiple of 1024, and so of the elements in a SIMD vector: no bit of an update depends on where a tensor is cut.
        """
        assert piece_elements % 1024 == 0
        elements = math.prod(self.shape)
        return tuple(
            Piece(
                name=self.name,
                number=number,
                first=first,
                elements=min(piece_elements, elements - first),
                widths=self.widths,
            )
            for number, first in enumerate(range(0, elements, piece_elements))
        )


def whole_pages(size: int) -> int:
    """`size` bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def stored_bytes(pieces: Iterable[Piece], homes: int) -> int:
    """Bytes that the pieces take on disk if there are `homes` copies of each."""
    return homes * sum(piece.bytes for piece in pieces)

"""Optimizer states on disk: the pieces they are read, updated and written by, and what these take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

PAGE = 4096
PARTS = ("exp_avg", "exp_avg_sq", "master")
LEAST_BYTES = 2**20
"""Smaller states take a drive nearly as long, and stay in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements `first` … of the flattened tensor `name`, the piece `number` of it. `widths`: bytes an element of each
    of its states, which lie one after the other: exp_avg, exp_avg_sq and, where weights are narrower than fp32, the
    master."""

    name: str
    number: int
    first: int
    elements: int
    widths: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """In memory and in the file: whole pages."""
        return whole_pages(self.elements * sum(self.widths))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor whose states are on disk."""

    name: str
    shape: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its states, in their order."""
        return PARTS[: len(self.widths)]

    def pieces(self, piece_elements: int) -> tuple[Piece, ...]:
        """In order; all but the last have `piece_elements`, a multiple of 1024: so of what a vector takes, and no bit
        of an update depends on where a tensor is cut."""
        assert piece_elements % 1024 == 0
        elements = math.prod(self.shape)
        return tuple(
            Piece(
                name=self.name, number=number, first=first, elements=min(piece_elements, elements - first),
                widths=self.widths,
            )
            for number, first in enumerate(range(0, elements, piece_elements))
        )  # fmt: skip


def whole_pages(size: int) -> int:
    """So many bytes, and the rest of their last page."""
    return -(-size // PAGE) * PAGE


def stored_bytes(pieces: Iterable[Piece], homes: int) -> int:
    """What the pieces take on disk, with so many homes for each."""
    return homes * sum(piece.bytes for piece in pieces)

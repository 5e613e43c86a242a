"""Distributes pieces of optimizer states over the files of several drives. Each file has a part of every piece, sized
so that all drives work on a piece at the same time and take equally long."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from planner.cpu.direct_file import Sum
from planner.schedule.state_pieces import PAGE, Piece

_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class File(Protocol):
    """The interface of a file to which pieces are written: see planner.cpu.direct_file."""

    def reserve(self, size: int) -> None: ...
    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None: ...
    def write(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a piece that is in one file: `bytes` bytes of the piece, from its byte `start` on, in file number
    `file`. Its first home (place in the file) begins at byte `offset` of the file, and its other homes follow."""

    file: int
    offset: int
    start: int
    bytes: int

    def floats(self, floats: int | None) -> int | None:
        """How many of this part's bytes are among the first `floats` bytes of the piece; None if `floats` is None."""
        return None if floats is None else max(0, min(floats - self.start, self.bytes))


def parts_of_pieces(pieces: Sequence[Piece], shares: Sequence[int], homes: int) -> list[tuple[Part, ...]]:
    """For each piece, its parts: one in each file, in whole pages, with sizes in proportion to the files' `shares`.
    Each part has `homes` places in its file."""
    ends, divided = [0] * len(shares), []
    upto = [sum(shares[:k]) for k in range(len(shares) + 1)]
    for piece in pieces:
        cuts = [round(piece.bytes // PAGE * up / upto[-1]) * PAGE for up in upto]
        parts = [Part(k, ends[k], low, high - low) for k, (low, high) in enumerate(itertools.pairwise(cuts))]
        divided.append(tuple(part for part in parts if part.bytes))
        for part in parts:
            ends[part.file] += homes * part.bytes
    return divided


def parts_in_turn(pieces: Sequence[Piece], files: int, homes: int) -> list[tuple[Part, ...]]:
    """For each piece, one part with all its bytes, dealt to the `files` files in turn. This is the layout of
    checkpoints that are older than shares."""
    ends = [0] * files
    dealt: list[tuple[Part, ...]] = []
    for k, piece in enumerate(pieces):
        dealt.append((Part(k % files, ends[k % files], 0, piece.bytes),))
        ends[k % files] += homes * piece.bytes
    return dealt


def file_sizes(parts: Sequence[Sequence[Part]], files: int, homes: int) -> list[int]:
    """The number of bytes that each file needs for its parts, each with `homes` places."""
    sizes = [0] * files
    for part in (part for piece in parts for part in piece):
        sizes[part.file] += homes * part.bytes
    return sizes


class Striped:
    """Reads and writes pieces whose parts are in several files, all parts at the same time. `files`: file number ->
    file, at most `count` of them; the mapping may be filled later."""

    def __init__(self, files: Mapping[int, File], count: int) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(2 * count, "offmate-drives") if count > 1 else None

    def move(
        self,
        parts: Sequence[Part],
        home: int,
        memory: Tensor,
        *,
        write: bool,
        floats: int | None,
        failed: Callable[[int, OSError], Exception],
    ) -> Sum | None:
        """Read a piece from its `parts` into `memory` (bytes), or with `write` write it from there. `home`: which of
        the places of each part. When this returns, every part is done or has failed. `floats`: how many of the piece's
        first bytes are floats that enter its sum; None for no sum. Returns the sum of the whole piece, combined from
        those of its parts. Raises the error that `failed` makes of a file's number and its OSError."""

        def one(part: Part) -> Sum | None:
            file = self._files[part.file]
            within = memory[part.start : part.start + part.bytes]
            try:
                act = file.write if write else file.read
                return act(part.offset + home * part.bytes, within, floats=part.floats(floats))
            except OSError as error:
                raise failed(part.file, error) from error

        if self._pool is None or len(parts) == 1:
            return together([one(part) for part in parts])
        moving = [self._pool.submit(one, part) for part in parts]
        wait(moving)
        return together([each.result() for each in moving])

    def close(self) -> None:
        """End the threads that read and write; the files stay open."""
        if self._pool is not None:
            self._pool.shutdown()


def together(sums: Sequence[Sum | None]) -> Sum | None:
    """Combine the sums of several parts, in order, to the sum of the whole piece. A single part's sum is returned as it
    is. None where a part has no sum."""
    total, finite = 0, True
    for each in sums:
        if each is None:
            return None
        total, finite = (total * _MIX + each.sum) & _WORD, finite and each.finite
    return Sum(total, finite)

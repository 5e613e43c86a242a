"""Pieces of states over the files of several drives: each file has its part of every piece, so that all drives work on
the one that is read or written, for as long as each other."""

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
    """What is asked of a file: see planner.cpu.direct_file."""

    def reserve(self, size: int) -> None: ...
    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None: ...
    def write(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """`bytes` of a piece from its byte `start` on, in the file of number `file`; its first home begins at `offset`, and
    the others follow."""

    file: int
    offset: int
    start: int
    bytes: int

    def floats(self, floats: int | None) -> int | None:
        """How many of its bytes are among the first `floats` of the piece."""
        return None if floats is None else max(0, min(floats - self.start, self.bytes))


def parts_of_pieces(pieces: Sequence[Piece], shares: Sequence[int], homes: int) -> list[tuple[Part, ...]]:
    """Of each piece its parts, in whole pages: to every file in proportion to its share."""
    ends, found = [0] * len(shares), []
    upto = [sum(shares[:k]) for k in range(len(shares) + 1)]
    for piece in pieces:
        cuts = [round(piece.bytes // PAGE * up / upto[-1]) * PAGE for up in upto]
        parts = [Part(k, ends[k], low, high - low) for k, (low, high) in enumerate(itertools.pairwise(cuts))]
        found.append(tuple(part for part in parts if part.bytes))
        for part in parts:
            ends[part.file] += homes * part.bytes
    return found


def parts_in_turn(pieces: Sequence[Piece], files: int, homes: int) -> list[tuple[Part, ...]]:
    """Of each piece one part, the whole: dealt to the files in turn, as checkpoints have it that tell no shares."""
    ends = [0] * files
    found: list[tuple[Part, ...]] = []
    for k, piece in enumerate(pieces):
        found.append((Part(k % files, ends[k % files], 0, piece.bytes),))
        ends[k % files] += homes * piece.bytes
    return found


def file_sizes(parts: Sequence[Sequence[Part]], files: int, homes: int) -> list[int]:
    """Bytes of each file."""
    sizes = [0] * files
    for part in (part for piece in parts for part in piece):
        sizes[part.file] += homes * part.bytes
    return sizes


class Striped:
    """Files by their numbers, that will be `count` at most, moved in parts at the same time."""

    def __init__(self, files: Mapping[int, File], count: int) -> None:
        self._files = files
        self._pool = ThreadPoolExecutor(2 * count, "offmate-drives") if count > 1 else None

    def move(
        self, parts: Sequence[Part], home: int, memory: Tensor, *, write: bool, floats: int | None,
        failed: Callable[[int, OSError], Exception],
    ) -> Sum | None:  # fmt: skip
        """A piece out of its parts, or into them; all are done, or have failed, when it returns. `floats` as for a
        file, of the piece; its sum is that of the parts. Raises what `failed` makes of a file's number and error."""

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
        """End its threads; the files stay open."""
        if self._pool is not None:
            self._pool.shutdown()


def together(sums: Sequence[Sum | None]) -> Sum | None:
    """The sum of what is in several parts, one after the other; of one part it is that part's."""
    total, finite = 0, True
    for each in sums:
        if each is None:
            return None
        total, finite = (total * _MIX + each.sum) & _WORD, finite and each.finite
    return Sum(total, finite)

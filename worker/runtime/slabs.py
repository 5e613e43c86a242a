"""Takes host memory of exact size straight from the system, so that freed memory goes back to it at once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor

_ALIGNMENT = 64


_Memory = TypeVar("_Memory", bound=mmap.mmap)


def map_memory(size: int, kind: type[_Memory]) -> _Memory:
    """Map `size` bytes of anonymous memory, rounded up to whole pages and filled with zeros, in huge pages where
    possible. A forked child process does not get the mapping, since pages would be copied when either process
    writes."""
    pages = max(1, -(-size // mmap.PAGESIZE))
    memory = kind(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # an advice that a kernel without huge pages refuses
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def slab_bytes(sizes: Sequence[int]) -> int:
    """The number of bytes that one slab needs to hold parts of these `sizes` (bytes), alignment included."""
    return sum(_aligned(size) for size in sizes)


def carve(slab: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield parts of these `sizes` (bytes), cut one after another from the byte tensor `slab`."""
    start = 0
    for size in sizes:
        yield slab[start : start + size]
        start += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

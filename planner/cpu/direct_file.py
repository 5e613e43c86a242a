"""Reads and writes a file without the page cache (O_DIRECT), in whole pages, and computes a checksum of the bytes on
the way.

Threads in C move the bytes, which do not need Python's lock; without a compiler Python's threads do. Both compute the
same checksum: 32 lanes of h = h * odd + x over every 2^20 bytes, mixed, and the sums of these pieces added.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from planner.cpu import build
from planner.cpu.direct import ALIGNMENT, BLOCK, DEPTH, PYTHON_BLOCK, SOURCE

log = logging.getLogger(__name__)

_SUMMED = 1 << 20
_LANES = 32
_ODD = 0x9E3779B1
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_EXPONENT = 0x7F800000


@dataclass(frozen=True, slots=True)
class Sum:
    """A checksum of bytes that were read or written. `sum`: 64 bits that depend on the bytes and their order.
    `finite`: whether all fp32 numbers among them are finite."""

    sum: int
    finite: bool


class DirectFile:
    """A file that is read and written without the page cache, created if it does not exist. The class and its methods
    raise OSError, with EINVAL if the file system does not support O_DIRECT. Any number of threads may move different
    parts of the file at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes on the disk for the file, durably: no later write into them will find the disk full."""
        # Not through the direct descriptor: where the space is reserved by writing, single bytes are written.
        usual = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fallocate(usual, 0, size)
            os.fsync(usual)
        finally:
            os.close(usual)

    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        """Fill `memory` with the file's bytes from `offset` on. `memory` is uint8, and `offset`, its address and its
        size are multiples of 4096 bytes. With `floats`, returns the checksum of these bytes, the first `floats` of
        which are fp32 numbers; else None."""
        return self._move(False, offset, memory, floats)

    def write(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        """Write all of `memory` to the file from `offset` on; `memory` must not change meanwhile. The data are durable
        only after `flush`. `offset`, the address and the size of `memory` are multiples of 4096 bytes. With `floats`,
        returns the checksum of the bytes, the first `floats` of which are fp32 numbers; else None."""
        return self._move(True, offset, memory, floats)

    def flush(self) -> None:
        """Wait until all bytes written are durable, also those in the drive's own cache."""
        os.fdatasync(self._fd)

    def _move(self, write: bool, offset: int, memory: Tensor, floats: int | None) -> Sum | None:
        assert offset % ALIGNMENT == memory.data_ptr() % ALIGNMENT == memory.nbytes % ALIGNMENT == 0
        error, total = _mover()(self._fd, write, memory, offset, floats)
        if error:
            raise OSError(error, os.strerror(error), str(self.path))
        return total


_Mover = Callable[[int, bool, Tensor, int, int | None], tuple[int, Sum | None]]


class _Native:
    def __init__(self) -> None:
        """Build and load direct.c. Raises CannotBuildError."""
        self._move = build.load(SOURCE).offmate_move
        self._move.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_void_p,
            *[ctypes.c_long] * 5,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        self._move.restype = ctypes.c_int

    def __call__(self, fd: int, write: bool, memory: Tensor, offset: int, floats: int | None) -> tuple[int, Sum | None]:
        total, wrong = ctypes.c_uint64(), ctypes.c_int()
        sums = (None, None) if floats is None else (ctypes.addressof(total), ctypes.addressof(wrong))
        error = self._move(fd, write, memory.data_ptr(), offset, memory.nbytes, BLOCK, DEPTH, floats or 0, *sums)
        return int(error), None if floats is None else Sum(total.value, not wrong.value)


class _InPython:
    """Moves bytes like `_Native`, but by Python's threads: another busy Python thread slows them down."""

    def __init__(self) -> None:
        self._pools = {write: ThreadPoolExecutor(DEPTH, f"offmate-{write}") for write in (False, True)}

    def __call__(self, fd: int, write: bool, memory: Tensor, offset: int, floats: int | None) -> tuple[int, Sum | None]:
        view, array = memory.numpy().data, memory.numpy()
        call = os.pwritev if write else os.preadv

        def part(low: int) -> list[Sum]:
            start, high = low, min(low + PYTHON_BLOCK, memory.nbytes)
            before = _sums(array, start, high, floats) if write else []
            while low < high:
                done = call(fd, [view[low:high]], offset + low)
                if done == 0:
                    raise OSError(errno.ENOSPC if write else errno.ENODATA, "")
                low += done
            return before if write else _sums(array, start, high, floats)

        try:
            sums = [s for part in self._pools[write].map(part, range(0, memory.nbytes, PYTHON_BLOCK)) for s in part]
        except OSError as error:
            return error.errno or errno.EIO, None
        return 0, None if floats is None else _together(sums)


def sum_of(memory: NDArray[np.uint8], floats: int) -> Sum:
    """The checksum that `DirectFile` would compute for `memory` (uint8, whole pages of 4096 bytes), the first `floats`
    bytes of which are fp32 numbers."""
    return _together(_sums(memory, 0, memory.nbytes, floats))


def _together(sums: list[Sum]) -> Sum:
    return Sum(sum(each.sum for each in sums) & _WORD, all(each.finite for each in sums))


def _sums(memory: NDArray[np.uint8], start: int, end: int, floats: int | None) -> list[Sum]:
    if floats is None:
        return []
    return [
        _one_sum(memory[low : min(low + _SUMMED, end)], max(0, floats - low), low // _SUMMED + 1)
        for low in range(start, end, _SUMMED)
    ]


def _one_sum(memory: NDArray[np.uint8], floats: int, seed: int) -> Sum:
    words = memory.view(np.uint32)
    rows = words.reshape(-1, _LANES)
    lanes = (rows * _powers()[-len(rows) :, None]).sum(axis=0, dtype=np.uint32)
    total = (seed * _MIX + memory.nbytes) & _WORD
    for lane in lanes.tolist():
        total = ((total ^ lane) * _MIX) & _WORD
        total ^= total >> 29
    wide = words[: floats // 4]
    return Sum(total, not bool(((wide & _EXPONENT) == _EXPONENT).any()))


@functools.cache
def _powers() -> NDArray[np.uint32]:
    """The weights of a lane's words in the checksum: odd^(n-1), …, odd, 1."""
    rising = np.full(_SUMMED // 4 // _LANES, _ODD, dtype=np.uint32)
    rising[0] = 1
    return np.cumprod(rising, dtype=np.uint32)[::-1]


@functools.cache
def _mover() -> _Mover:
    try:
        return _Native()
    except build.CannotBuildError as error:
        log.warning("disk: read and written by Python's threads, slower than it could be (%s)", error)
        return _InPython()

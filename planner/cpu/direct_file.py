"""A file that is read and written past the page cache (O_DIRECT), in whole pages, with a sum of what passes.

Transfers are done by threads in C, which need nothing of Python's lock; where there is no compiler, by Python's. Both
sum alike: 32 lanes of h = h * odd + x over every 2^20 bytes, mixed, and the pieces added up.
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
    """What passed: `sum`, 64 bits of its content and order, and whether all of its fp32 numbers are finite."""

    sum: int
    finite: bool


class DirectFile:
    """A file of this process, made where it is not there. Raises OSError, as do its methods: EINVAL where the file
    system knows no direct transfers. Any number of threads may move different parts at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()

    def reserve(self, size: int) -> None:
        """Take so many bytes of the disk, durably: no write into them will find it full."""
        usual = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)  # where it is done by writing, that is in single bytes
        try:
            os.posix_fallocate(usual, 0, size)
            os.fsync(usual)
        finally:
            os.close(usual)

    def read(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        """Fill `memory` (bytes, in whole pages). `floats`: sum it up, of whose first bytes so many are fp32."""
        return self._move(False, offset, memory, floats)

    def write(self, offset: int, memory: Tensor, *, floats: int | None = None) -> Sum | None:
        """Write all of `memory`, which is to stay as it is meanwhile. It is durable after `flush`."""
        return self._move(True, offset, memory, floats)

    def flush(self) -> None:
        """Return when all that was written is durable, also from the drive's own memory."""
        os.fdatasync(self._fd)

    def _move(self, write: bool, offset: int, memory: Tensor, floats: int | None) -> Sum | None:
        assert offset % ALIGNMENT == memory.data_ptr() % ALIGNMENT == memory.nbytes % ALIGNMENT == 0
        error, found = _mover()(self._fd, write, memory, offset, floats)
        if error:
            raise OSError(error, os.strerror(error), str(self.path))
        return found


_Mover = Callable[[int, bool, Tensor, int, int | None], tuple[int, Sum | None]]


class _Native:
    def __init__(self) -> None:
        """Raises CannotBuildError."""
        self._move = build.load(SOURCE).offmate_move
        self._move.argtypes = (
            ctypes.c_int, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_long] * 5, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        self._move.restype = ctypes.c_int

    def __call__(
        self, fd: int, write: bool, memory: Tensor, offset: int, floats: int | None
    ) -> tuple[int, Sum | None]:  # fmt: skip
        total, wrong = ctypes.c_uint64(), ctypes.c_int()
        sums = (None, None) if floats is None else (ctypes.addressof(total), ctypes.addressof(wrong))
        error = self._move(
            fd, write, memory.data_ptr(), offset, memory.nbytes, BLOCK, DEPTH, floats or 0, *sums
        )  # fmt: skip
        return int(error), None if floats is None else Sum(total.value, not wrong.value)


class _InPython:
    """The same by Python's threads: a busy one beside them holds them up."""

    def __init__(self) -> None:
        self._pools = {write: ThreadPoolExecutor(DEPTH, f"offmate-{write}") for write in (False, True)}

    def __call__(
        self, fd: int, write: bool, memory: Tensor, offset: int, floats: int | None
    ) -> tuple[int, Sum | None]:  # fmt: skip
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
            found = [s for part in self._pools[write].map(part, range(0, memory.nbytes, PYTHON_BLOCK)) for s in part]
        except OSError as error:
            return error.errno or errno.EIO, None
        return 0, None if floats is None else _together(found)


def sum_of(memory: NDArray[np.uint8], floats: int) -> Sum:
    """What `DirectFile` finds of the bytes `memory`, in whole pages, of which the first `floats` are fp32."""
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
    """odd^(n-1), …, odd, 1."""
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

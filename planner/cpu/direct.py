"""Reads parts of files into host memory without the page cache (O_DIRECT), several blocks at a time.

Weights that every step reads again would only push each other out of the page cache, and everything else with them;
copies out of it also cost processor time. If a file system does not support O_DIRECT, its files are read through the
page cache.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from planner.cpu import build

log = logging.getLogger(__name__)

ALIGNMENT = 4096  # of offsets, lengths and memory: enough for every disk
SOURCE = Path(__file__).with_name("direct.c")
DEPTH = 4
BLOCK = 4 * 2**20
PYTHON_BLOCK = 16 * 2**20
_PROBED_S = 0.5


def room(size: int) -> int:
    """Bytes of memory that are enough to read `size` bytes from any offset of a file, since reads begin and end at
    multiples of 4096 bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT


class OpenFile:
    """A file that stays open for reading as long as this object lives. Creating one raises OSError if the file cannot
    be opened."""

    def __init__(self, path: Path) -> None:
        self.path, self._direct = path, True
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._fd, self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC), False
            _tell_cached(path.parent)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read(self, offset: int, size: int, memory: Tensor) -> Tensor:
        """Read `size` bytes of the file from `offset` on into `memory`. Returns the part of `memory` that holds them.
        `memory` has at least `room(size)` bytes and begins at a multiple of 4096. Raises OSError."""
        first = offset // ALIGNMENT * ALIGNMENT
        lead = offset - first
        span = -(-(lead + size) // ALIGNMENT) * ALIGNMENT
        assert span <= memory.nbytes and memory.data_ptr() % ALIGNMENT == 0
        was_direct = self._direct
        error = _reader()(self._fd, memory, first, span, lead + size)
        # Some file systems of networks and virtual machines open a file for direct reads, but then refuse the reads, or
        # stop in the middle of one, where no block begins.
        if error == errno.EINVAL and was_direct:
            self._read_cached()
            error = _reader()(self._fd, memory, first, span, lead + size)
        if error:
            raise OSError(error, os.strerror(error), str(self.path))
        return memory[lead : lead + size]

    def _read_cached(self) -> None:
        """Read through the page cache from now on. The descriptor still belongs to the same file, even if another file
        has got its name."""
        cached = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.dup2(cached, self._fd, inheritable=False)
        os.close(cached)
        self._direct = False
        _tell_cached(self.path.parent)


@functools.cache
def _tell_cached(folder: Path) -> None:
    log.info("disk: files in %s are read through the page cache, their file system knows no direct reads", folder)


class _Native:
    def __init__(self) -> None:
        """Build and load direct.c. Raises CannotBuildError."""
        self._read = build.load(SOURCE).offmate_read
        self._read.argtypes = (ctypes.c_int, ctypes.c_void_p, *[ctypes.c_long] * 5)
        self._read.restype = ctypes.c_int

    def __call__(self, fd: int, memory: Tensor, offset: int, size: int, needed: int) -> int:
        return int(self._read(fd, memory.data_ptr(), offset, size, needed, BLOCK, DEPTH))


class _InPython:
    """Reads like `_Native`, but by Python's threads: another busy Python thread slows them down."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(DEPTH, "offmate-read")

    def __call__(self, fd: int, memory: Tensor, offset: int, size: int, needed: int) -> int:
        view = memory.numpy().data

        def part(low: int) -> int:
            high = min(low + PYTHON_BLOCK, size)
            while low < min(high, needed):
                done = os.preadv(fd, [view[low:high]], offset + low)
                if done == 0:
                    return errno.ENODATA
                low += done
            return 0

        try:
            return max(self._pool.map(part, range(0, size, PYTHON_BLOCK)), default=0)
        except OSError as error:
            return error.errno or errno.EIO


@functools.cache
def _reader() -> _Native | _InPython:
    try:
        return _Native()
    except build.CannotBuildError as error:
        log.warning("disk: read by Python's threads, slower than it could be (%s)", error)
        return _InPython()


def mapped_at(tensor: Tensor) -> tuple[Path, int] | None:
    """The file from which the memory of a contiguous tensor is mapped, and the tensor's offset in that file in bytes;
    None if the memory is not mapped from a file."""
    start = tensor.data_ptr()
    for low, high, offset, path in _mappings():
        if low <= start and start + tensor.nbytes <= high and path is not None and path.is_file():
            return path, offset + start - low
    return None


def _mappings() -> Iterator[tuple[int, int, int, Path | None]]:
    with Path("/proc/self/maps").open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, _, offset, _, inode, *name = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(end, 16) for end in span.split("-"))
            yield low, high, int(offset, 16), Path(name[0]) if inode != "0" and name else None


def read_rate(paths: Iterable[Path], memory: Tensor) -> float:
    """The rate, in bytes per second, at which the files are read from their beginnings into `memory`, measured for
    half a second; 0.0 if there is nothing to read. Raises OSError."""
    began, size = time.perf_counter(), 0
    for path in paths:
        file, length = OpenFile(path), path.stat().st_size
        for start in range(0, length, memory.nbytes - ALIGNMENT):
            size += file.read(start, min(length - start, memory.nbytes - ALIGNMENT), memory).nbytes
            if (taken := time.perf_counter() - began) > _PROBED_S:
                return size / taken
    return size / (time.perf_counter() - began) if size else 0.0

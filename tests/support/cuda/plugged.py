"""An allocator that a process puts in the place of PyTorch's own, by `torch.cuda.memory.change_current_allocator`.

It is called as PyTorch calls it: by C++, which makes errors of what it throws. It gets its memory from this driver.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable

from tests.support.cuda.memory import Arena

_ADDRESS = ctypes.c_void_p
_ALLOCATE = ctypes.CFUNCTYPE(_ADDRESS, ctypes.c_ssize_t, ctypes.c_int, _ADDRESS)
_FREE = ctypes.CFUNCTYPE(None, _ADDRESS, ctypes.c_ssize_t, ctypes.c_int, _ADDRESS)
_RECORD = ctypes.CFUNCTYPE(None, _ADDRESS, _ADDRESS)
_TEXT_BYTES = 1000
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_WORDS = {OUT_OF_MEMORY: "out of memory"}


def words_of(code: int) -> str:
    """cudaGetErrorString"""
    return _WORDS[code]


class Driver:
    """cudaMalloc, cudaFree, cudaDeviceSynchronize and cudaGetLastError.

    used_bytes      that are taken now
    mallocs, frees  how often they were called
    """

    def __init__(
        self,
        arena: Arena,
        guard: ctypes.CDLL,
        *,
        free_bytes: Callable[[], int],
        finish: Callable[[], None],
        mapped: Callable[[int, int], None],
    ) -> None:
        """`finish` lets the device do all it was given; `mapped(address, size)` is told what is new. Addresses come
        from the arena's end."""
        self.used_bytes = self.mallocs = self.frees = 0
        self._free_bytes, self._finish, self._mapped = free_bytes, finish, mapped
        self._sizes: dict[int, int] = {}
        self._spare: dict[int, list[int]] = defaultdict(list)
        self._bottom = arena.base + arena.size
        self._last = threading.local()  # each thread of the host has an error of its own
        self._functions = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_ADDRESS), ctypes.c_size_t)(self._malloc),
            ctypes.CFUNCTYPE(ctypes.c_int, _ADDRESS)(self._free),
            ctypes.CFUNCTYPE(ctypes.c_int)(self._synchronize),
            ctypes.CFUNCTYPE(ctypes.c_int)(self.last_error),
        )
        guard.put_driver_there(*self._functions)

    def failed(self, code: int) -> int:
        """A call has failed: the thread's last error is this one until somebody asks for it."""
        self._last.code = code
        return code

    def last_error(self) -> int:
        """0 where there is none."""
        code = getattr(self._last, "code", 0)
        self._last.code = 0
        return code

    def _malloc(self, target: ctypes._Pointer[ctypes.c_void_p], size: int) -> int:
        self.mallocs += 1
        if size > self._free_bytes():
            return self.failed(OUT_OF_MEMORY)
        if self._spare[size]:
            address = self._spare[size].pop()
        else:
            self._bottom -= size
            address = self._bottom
        self._sizes[address] = size
        self.used_bytes += size
        self._mapped(address, size)
        target[0] = ctypes.c_void_p(address)
        return 0

    def _free(self, address: int) -> int:
        self.frees += 1
        self._finish()
        size = self._sizes.pop(address)
        self._spare[size].append(address)
        self.used_bytes -= size
        return 0

    def _synchronize(self) -> int:
        self._finish()
        return 0


class Plugged:
    """What `torch._C._cuda_customAllocator` gives."""

    def __init__(self, guard: ctypes.CDLL, allocate: int, free: int) -> None:
        """Both are addresses of functions."""
        self._by = guard.allocate_by
        self._by.argtypes = [_ADDRESS, ctypes.c_ssize_t, _ADDRESS, _ADDRESS, ctypes.c_size_t]
        self._by.restype = _ADDRESS
        self._allocate, self._free = allocate, _FREE(free)
        self._record: Callable[[int, int], None] | None = None
        self._reset: Callable[[], None] | None = None

    def set_record_stream_fn(self, address: int) -> None:
        self._record = _RECORD(address)

    def set_reset_fn(self, address: int) -> None:
        self._reset = ctypes.CFUNCTYPE(None)(address)

    def allocate(self, nbytes: int, stream: int) -> int:
        """Raises RuntimeError, as PyTorch does for whatever is thrown."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        address: int | None = self._by(self._allocate, nbytes, stream, text, _TEXT_BYTES)
        if address is None:
            raise RuntimeError(text.value.decode())
        return address

    def free(self, address: int, nbytes: int, stream: int) -> None:
        self._free(address, nbytes, 0, stream)

    def record(self, address: int, stream: int) -> None:
        """Without such a function PyTorch does nothing."""
        if self._record is not None:
            self._record(address, stream)

    def empty(self) -> None:
        if self._reset is not None:
            self._reset()

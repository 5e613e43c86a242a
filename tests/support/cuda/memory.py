"""The device's memory: addresses, and a model of PyTorch's caching allocator as it is by default.

The rules are those of c10/cuda/CUDACachingAllocator.cpp. Sizes are rounded up to 512 bytes; up to 1 MiB they come from
segments of 2 MiB, below 10 MiB from segments of 20 MiB, above from a segment of their own, rounded up to 2 MiB. Of the
free blocks of a stream's pool the smallest that fits is taken, and split where what is left is worth it. Free
neighbours become one. A segment goes back to the driver only where memory runs out or `empty_cache` is called.
"""

from __future__ import annotations

import bisect
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 2**20
_BLOCK, _SMALL, _SMALL_SEGMENT = 512, MIB, 2 * MIB
_LARGE, _LARGE_SEGMENT, _ROUND_LARGE = 10 * MIB, 20 * MIB, 2 * MIB
_NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE


class Arena:
    """Addresses of the device, as memory of the host that costs nothing until something is written there."""

    def __init__(self, size: int) -> None:
        self.size = size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.base = whole.data_ptr()
        self._typed = {torch.uint8: whole}

    def at(self, address: int, dtype: torch.dtype, size: Iterable[int], stride: Iterable[int]) -> Tensor:
        """A plain tensor at an address."""
        if dtype not in self._typed:
            self._typed[dtype] = self._typed[torch.uint8].view(dtype)
        return self._typed[dtype].as_strided(tuple(size), tuple(stride), (address - self.base) // dtype.itemsize)


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A part of a segment. `users`: streams that were told by `record_stream` that they use it."""

    address: int
    size: int
    stream: object
    small: bool
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None
    users: tuple[object, ...] = ()


@dataclass(slots=True)
class Stat:
    """A number of bytes, and the most it was."""

    now: int = 0
    peak: int = 0

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


class Allocator:
    """Blocks for streams.

    allocated, requested, reserved    bytes in blocks, asked for, in segments
    taken, returned                   segments got from the driver and given back
    retries, failures                 times that memory ran out, and that it was not enough even so
    """

    def __init__(
        self,
        arena: Arena,
        *,
        free_bytes: Callable[[], int],
        done: Callable[[object], Callable[[], bool]],
        finish: Callable[[], None],
        freed: Callable[[Block], None],
        mapped: Callable[[int, int], None],
    ) -> None:
        """`free_bytes`: what the driver still has. `done(stream)` gives what says whether the stream has done all that
        it was given so far; `finish` lets the device do all it was given. `freed` is told what may be used again,
        `mapped(address, size)` what is new."""
        self._arena, self._free_bytes, self._done, self._finish = arena, free_bytes, done, finish
        self._freed, self._mapped = freed, mapped
        self.cap_bytes: int | None = None  # the cap
        self.allocated, self.requested, self.reserved = Stat(), Stat(), Stat()
        self.taken = self.returned = self.retries = self.failures = 0
        self.history: list[dict[str, object]] | None = None  # what comes and goes, in the words of `_snapshot`
        self._pools: dict[tuple[object, bool], list[tuple[int, int]]] = defaultdict(list)  # of (size, address), sorted
        self._free: dict[int, Block] = {}  # by address
        self._used: list[tuple[Block, list[Callable[[], bool]]]] = []  # free as soon as all of these are so
        self._unmapped: dict[int, list[int]] = defaultdict(list)  # addresses of segments given back, by size
        self._top = arena.base

    def allocate(self, requested: int, stream: object) -> Block:
        """A block of at least `requested` bytes, more than 0. Raises torch.OutOfMemoryError."""
        self._settle()
        size = -(-requested // _BLOCK) * _BLOCK
        small = size <= _SMALL
        block = self._best_fit(size, stream, small) or self._segment(size, stream, small)
        if block is None:
            self.retries += 1
            self.release()
            block = self._segment(size, stream, small)
        if block is None:
            self.failures += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {requested / MIB:.2f} MiB: {self.allocated.now / MIB:.1f} MiB "
                f"allocated, {self.reserved.now / MIB:.1f} MiB reserved, cap {self.cap_bytes} bytes (emulated)"
            )
        if block.size - size >= _BLOCK if small else block.size - size > _SMALL:
            self._split(block, size)
        block.requested = requested
        self.allocated.add(block.size)
        self.requested.add(requested)
        if self.history is not None:
            self.history.append({"action": "alloc", "addr": block.address, "size": requested})
        return block

    def free(self, block: Block) -> None:
        """Let the block be used again, by what its stream is given from now on; where other streams were recorded, when
        these have done what they have been given."""
        self.allocated.add(-block.size)
        if self.history is not None:
            self.history.append({"action": "free_requested", "addr": block.address, "size": block.requested})
        if block.users:
            self._used.append((block, [self._done(stream) for stream in block.users]))
        else:
            self._give_back(block)

    def release(self) -> None:
        """Give segments back in which nothing is. The driver waits for the device."""
        if self._used:
            self._finish()
            self._settle()
        for block in list(self._free.values()):
            if block.previous is None and block.next is None:
                self._take(block)
                self._finish()
                self.returned += 1
                self.reserved.add(-block.size)
                self._unmapped[block.size].append(block.address)

    def reset_peaks(self) -> None:
        """Begin to look for the most anew."""
        for stat in (self.allocated, self.requested, self.reserved):
            stat.peak = stat.now

    def _settle(self) -> None:
        """Give back the blocks whose other users are done."""
        waiting, self._used = self._used, []
        for block, dones in waiting:
            if all(done() for done in dones):
                block.users = ()
                self._give_back(block)
            else:
                self._used.append((block, dones))

    def _give_back(self, block: Block) -> None:
        self.requested.add(-block.requested)
        self._freed(block)
        if block.previous is not None and block.previous.address in self._free:
            block = self._join(self._take(block.previous), block)
        if block.next is not None and block.next.address in self._free:
            block = self._join(block, self._take(block.next))
        self._put(block)

    @staticmethod
    def _join(block: Block, after: Block) -> Block:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            address=block.address + size,
            size=block.size - size,
            stream=block.stream,
            small=block.small,
            previous=block,
            next=block.next,
        )
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._put(rest)

    def _put(self, block: Block) -> None:
        bisect.insort(self._pools[block.stream, block.small], (block.size, block.address))
        self._free[block.address] = block

    def _take(self, block: Block) -> Block:
        pool = self._pools[block.stream, block.small]
        pool.pop(bisect.bisect_left(pool, (block.size, block.address)))
        return self._free.pop(block.address)

    def _best_fit(self, size: int, stream: object, small: bool) -> Block | None:
        pool = self._pools[stream, small]
        at = bisect.bisect_left(pool, (size, 0))
        return self._take(self._free[pool[at][1]]) if at < len(pool) else None

    def _segment(self, size: int, stream: object, small: bool) -> Block | None:
        room = _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        room = _SMALL_SEGMENT if small else room
        capped = self.cap_bytes is not None and self.reserved.now + room > self.cap_bytes
        if capped or room > self._free_bytes():
            return None
        if self._unmapped[room]:
            address = self._unmapped[room].pop()
        else:
            address, self._top = self._top, self._top + room
            assert self._top <= self._arena.base + self._arena.size, "the arena has no more addresses"
        self._mapped(address, room)
        self.taken += 1
        self.reserved.add(room)
        return Block(address=address, size=room, stream=stream, small=small)

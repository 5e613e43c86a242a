"""The device: its streams, its memory, the host's memory that copies can reach, and what the host waited for."""

from __future__ import annotations

import bisect
import ctypes
import functools
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tests import ROOT
from tests.support.cuda.memory import MIB, Allocator, Arena, Block
from tests.support.cuda.plugged import OUT_OF_MEMORY, Driver, Plugged, words_of
from tests.support.cuda.streams import Marker, Queues, Stream
from tests.support.cuda.workspaces import Workspaces

CUDA = torch.device("cuda", 0)
RUNTIME_BYTES = 300 * MIB
"""What a device's runtime takes beside what is allocated."""
OURS = tuple(str(ROOT / name) for name in ("planner", "worker"))


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waited for the device, or might have. `where`: the innermost function of planner/ and worker/ that was
    running, as "worker/engine/engine.py:step"; empty where none was. `thread`: the name of the one that waited."""

    what: str
    where: str
    thread: str


class Layout(NamedTuple):
    """Where a tensor is, which is all that queued work knows of it."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tensor.data_ptr(), tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()))


class Device:
    """The device of a process.

    total_bytes    of its memory, of which the runtime has RUNTIME_BYTES
    dry            nothing is computed or copied; memory is as ever
    poison         what is allocated and what is freed is NaN
    host_bytes     of the host's memory can be registered or pinned
    scratch        kernels allocate for themselves what those of a card do (kernels.py)
    fraction       of the memory that the process may have
    sync_debug     torch.cuda.set_sync_debug_mode's
    waits          each time that the host waited, or might have; clear it to begin anew
    seed, offset   the random generator's state
    workspaces     of matrix products
    initialized    as PyTorch sees it: its allocator can be changed before
    plugged        the allocator that somebody has put in the place of PyTorch's; `driver` is what it gets memory from
    """

    def __init__(self, guard: ctypes.CDLL, *, total_bytes: int = 1024 * MIB, address_bytes: int = 2**35) -> None:
        self.total_bytes, self.dry, self.poison, self.sync_debug = total_bytes, False, True, "default"
        self.host_bytes, self.fraction, self.scratch = sys.maxsize, 1.0, False
        self.waits: list[HostWait] = []
        self.seed = self.offset = 0
        self.queues = Queues(self.host_waits)
        self.arena = Arena(address_bytes)
        self.allocator = Allocator(
            self.arena,
            free_bytes=lambda: self.free_bytes,
            done=self._done,
            finish=self._finish,
            freed=lambda block: self._fill(block.address, block.size, block.stream),
            mapped=self._fill_now,
        )
        self.driver = Driver(
            self.arena, guard, free_bytes=lambda: self.free_bytes, finish=self._finish, mapped=self._fill_now
        )
        self.initialized, self.plugged = True, None
        self.host = HostMemory()
        self.workspaces = Workspaces(self.storage)
        self._blocks: dict[int, Block] = {}  # in use, by address
        self._dead: deque[Callable[[], None]] = deque()  # what frees memory that no tensor uses

    def rest(self) -> None:
        """As new, but for memory that is in use."""
        self.workspaces.clear()
        self.reap()
        self.queues.rest()
        self.dry, self.poison, self.sync_debug = False, True, "default"
        self.host_bytes = sys.maxsize
        self.driver.last_error()
        self.fraction, self.allocator.cap_bytes, self.scratch = 1.0, None, False
        self.initialized, self.plugged = True, None
        self.allocator.release()
        self.allocator.reset_peaks()
        self.waits.clear()

    def host_waits(self, what: str, seen: bool) -> None:
        """Note that the host waits. `seen`: torch's debug mode takes notice. Raises RuntimeError if that is "error"."""
        self.waits.append(HostWait(what, _where(), threading.current_thread().name))
        if seen and self.sync_debug == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")

    def give(self, run: Callable[[], object]) -> None:
        """Queue what plain tensors do on the thread's current stream."""
        self.reap()
        if not self.dry:
            self.queues.give(self.queues.current, functools.partial(_without_dispatch, run))

    def launched(self) -> None:
        """A kernel is on its stream. PyTorch asks for the thread's last error then, whoever's call has left it."""
        if code := self.driver.last_error():
            raise torch.AcceleratorError(f"CUDA error: {words_of(code)}\nSearch for it in CUDA's documents.")

    def synchronize_current(self, what: str, *, seen: bool = True) -> None:
        """Wait for the thread's current stream."""
        self.host_waits(what, seen)
        self.queues.until(self.queues.mark(self.queues.current))

    def synchronize(self) -> None:
        """Wait for everything. Torch's debug mode does not see it."""
        self.host_waits("synchronize", False)
        self.reap()
        self._finish()
        self.queues.check()

    def _finish(self) -> None:
        self.queues.finish()

    # -- memory

    @property
    def free_bytes(self) -> int:
        """What the driver has left."""
        return self.total_bytes - RUNTIME_BYTES - self.allocator.reserved.now - self.driver.used_bytes

    def storage(self, nbytes: int) -> Tensor:
        """New memory, a plain tensor of bytes. It is free when no tensor uses it."""
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self.queues.lock:
            self.reap()
            stream = self.queues.current
            if self.plugged is not None:
                address = self.plugged.allocate(nbytes, stream.number)
                free = functools.partial(self._free_by, self.plugged, address, nbytes, stream)
            else:
                block = self.allocator.allocate(nbytes, stream)
                self._blocks[block.address] = block
                address, free = block.address, functools.partial(self._free, block)
            self._fill(address, nbytes, stream, self.queues.name)
        return lent(address, nbytes, functools.partial(self._dead.append, free))

    def _free(self, block: Block) -> None:
        del self._blocks[block.address]
        self.allocator.free(block)

    def _free_by(self, plugged: Plugged, address: int, nbytes: int, stream: Stream) -> None:
        self._fill(address, nbytes, stream)
        plugged.free(address, nbytes, stream.number)

    def reap(self) -> None:
        """Free the memory that no tensor uses."""
        while self._dead:
            with self.queues.lock:
                if self._dead:
                    self._dead.popleft()()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Let the tensor's block not be used again before `stream` has done what it was given before it was freed."""
        address = tensor.untyped_storage().data_ptr()
        block = self._blocks.get(address)
        if block is None:
            assert self.plugged is not None
            self.plugged.record(address, stream.number)
        elif stream is not block.stream:
            block.users = (*block.users, stream)

    def draw(self, numbers: int) -> int:
        """A seed for as many random numbers, which others do not get."""
        with self.queues.lock:
            found = (self.seed * 1_000_003 + self.offset * 7919) % 2**63
            self.offset += 4 * (1 + numbers // 1024)
        return found

    def at(self, layout: Layout) -> Tensor:
        """A plain tensor there."""
        if 0 in layout.size:
            return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype)
        return self.arena.at(*layout)

    def _done(self, stream: object) -> Callable[[], bool]:
        assert isinstance(stream, Stream)
        marker = Marker(stream)
        self.queues.add(stream, mark=marker)
        return lambda: marker.done

    def _fill_now(self, address: int, size: int) -> None:
        if self.poison and not self.dry:
            ctypes.memset(address, 0xFF, size)

    def _fill(self, address: int, size: int, stream: object, name: str | None = None) -> None:
        """Poison, in the stream's order: each floating point number of bytes 0xFF is NaN."""
        if self.poison and not self.dry:
            assert isinstance(stream, Stream)
            self.queues.add(stream, functools.partial(ctypes.memset, address, 0xFF, size), name=name)


class HostMemory:
    """The host's memory that the device can reach: registered by its owner, or pinned, of torch's own pool."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self._spare: dict[int, deque[int]] = defaultdict(deque)  # addresses of the pool's buffers, by size
        self._pooled: dict[int, Tensor] = {}

    def register(self, address: int, size: int) -> None:
        """Reach these bytes from now on."""
        bisect.insort(self._starts, address)
        self._sizes[address] = size

    def unregister(self, address: int) -> None:
        """Reach them no more."""
        self._starts.remove(address)
        del self._sizes[address]

    def reaches(self, address: int, size: int) -> bool:
        """Whether all of these bytes are in one such piece."""
        start = self._start(address)
        return start is not None and address + size <= start + self._sizes[start]

    def pools(self, address: int) -> bool:
        """Whether this is memory of the pool."""
        return self._start(address) in self._pooled

    def _start(self, address: int) -> int | None:
        at = bisect.bisect_right(self._starts, address) - 1
        return self._starts[at] if at >= 0 else None

    @property
    def bytes(self) -> int:
        """How many it can reach."""
        return sum(self._sizes.values())

    def pinned(self, nbytes: int, *, most: int) -> tuple[Tensor, bool]:
        """A buffer of the pool, which has it back when no tensor uses it, and whether the pool had none that is free.
        Sizes are rounded up to powers of two. Raises torch.AcceleratorError where that makes more than `most` bytes."""
        size = 1 << max(0, nbytes - 1).bit_length()
        new = not self._spare[size]
        if new:
            if self.bytes + size > most:
                raise torch.AcceleratorError(f"CUDA error: {words_of(OUT_OF_MEMORY)}")
            memory = torch.empty(size, dtype=torch.uint8)
            self._pooled[memory.data_ptr()] = memory
            self.register(memory.data_ptr(), size)
            self._spare[size].append(memory.data_ptr())
        address = self._spare[size].popleft()
        return lent(address, size, functools.partial(self._spare[size].append, address))[:nbytes], new

    def at(self, layout: Layout) -> Tensor:
        """A plain tensor there. Raises RuntimeError where the device cannot reach it (any more)."""
        span = 1 + sum((n - 1) * s for n, s in zip(layout.size, layout.stride, strict=True))
        nbytes = span * layout.dtype.itemsize
        if not self.reaches(layout.address, nbytes):
            raise RuntimeError(f"a copy reaches host memory that is not registered: {layout}")
        buffer = (ctypes.c_char * nbytes).from_address(layout.address)
        return torch.frombuffer(buffer, dtype=layout.dtype).as_strided(layout.size, layout.stride)


def lent(address: int, nbytes: int, ended: Callable[[], None]) -> Tensor:
    """A plain tensor of these bytes; `ended` is called when no tensor uses them any more."""
    buffer = _buffer_type(nbytes).from_address(address)
    buffer.ended = ended
    return torch.frombuffer(buffer, dtype=torch.uint8)


@functools.cache
def _buffer_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    class Buffer(ctypes.c_char * nbytes):  # type: ignore[misc]
        def __del__(self) -> None:
            self.ended()

    return Buffer


def _below_autograd() -> tuple[torch._C.DispatchKeySet, torch._C.DispatchKeySet]:
    """The keys that dispatch includes and excludes where a kernel of the CPU runs."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
        return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


_KEYS = _below_autograd()


def _without_dispatch(run: Callable[[], object]) -> None:
    """As a kernel runs, whatever the thread is about that runs it: without autograd, autocast and modes. It may be in
    the middle of a fake operation, whose kernels are Meta's, when the garbage collector ends what waits for the
    device."""
    with torch._C._ForceDispatchKeyGuard(*_KEYS), torch._C.DisableTorchFunction():
        run()


def _where() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"
        frame = frame.f_back
    return ""

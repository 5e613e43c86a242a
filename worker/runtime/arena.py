"""The device's memory as the plan has it: PyTorch's allocator for CUDA is `arena.c`, and puts tensors in their places.

PyTorch lets only an allocator of one's own decide an address, and takes one only before anything has used the device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from planner.cpu import build
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.places import Arrangement, Place, key_of

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("arena.c")
_NO_MEMORY = "CUDA out of memory"
_THROW = "_ZSt21__throw_runtime_errorPKc"  # std::__throw_runtime_error(char const*): C cannot throw by itself


class _Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "offset", "most")]


class CannotTakeOverError(Exception):
    """Why PyTorch's own allocator stays, in words for the log."""


class Memory(Protocol):
    """Where an engine's tensors go on the device. Methods are called by the one thread that may allocate there."""

    def expect(self, op: Op | None) -> None:
        """What is allocated from now on is `op`'s, until the next call; None: it is in no plan."""

    def expect_item(self, item: str) -> None:
        """What is allocated next is the item, which is there between steps."""

    def lengths(self, tokens: Sequence[int]) -> None:
        """The slices of the step to come have so many tokens, round by round."""

    def close(self) -> None:
        """No more is expected. What is there stays as long as somebody uses it."""


class NoPlaces:
    """Wherever the allocator likes."""

    def expect(self, op: Op | None) -> None:
        """Nothing to do."""

    def expect_item(self, item: str) -> None:
        """Nothing to do."""

    def lengths(self, tokens: Sequence[int]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What has become of the device's memory so far.

    allocated, most_allocated    bytes of tensors, and the most since `reset_peaks`
    reserved, most_reserved      bytes taken from the driver, likewise
    mallocs, frees               calls of the driver
    strays                       planned allocations that did not find their places since the arena was opened
    """

    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int
    mallocs: int
    frees: int
    strays: int


class Arena:
    """The allocator of this process's device memory."""

    def __init__(self) -> None:
        """Become PyTorch's allocator. Raises CannotTakeOverError."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise CannotTakeOverError("the device is in use already")
        try:
            self._library = library = build.load(SOURCE)
            runtime, thrower = _runtime(), ctypes.CDLL("libstdc++.so.6")
            called = [_address(runtime, n) for n in ("cudaMalloc", "cudaFree", "cudaDeviceSynchronize")]
            library.arena_driver.argtypes = [ctypes.c_void_p] * 4
            library.arena_driver(*called, _address(thrower, _THROW))
            library.arena_count.restype = ctypes.c_int64
            library.arena_limit.argtypes = [ctypes.c_int64]
            library.arena_open.argtypes = [ctypes.c_int64] * 3
            library.arena_expect.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3]
            allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(library._name, "arena_allocate", "arena_free")
            allocator.allocator().set_record_stream_fn(_address(library, "arena_record"))
            allocator.allocator().set_reset_fn(_address(library, "arena_empty"))
            self.set_limit(None)
            torch.cuda.memory.change_current_allocator(allocator)
        except (build.CannotBuildError, AttributeError, OSError, RuntimeError) as error:
            raise CannotTakeOverError(str(error)) from error
        self.expect = library.arena_expect

    def counts(self) -> Counts:
        """So far."""
        return Counts(*(int(self._library.arena_count(number)) for number in range(len(fields(Counts)))))

    def set_limit(self, limit_bytes: int | None) -> None:
        """Take no more from the driver than that."""
        self._library.arena_limit(2**62 if limit_bytes is None else limit_bytes)

    def empty(self) -> None:
        """Give back what is taken and not used."""
        self._library.arena_empty()

    def reset_peaks(self) -> None:
        """Begin to look for the most anew."""
        self._library.arena_reset_peaks()

    def open(self, arrangement: Arrangement) -> bool:
        """Take an arrangement's memory from the driver: whether there was so much, and no arena that is in use."""
        found = arrangement
        return bool(self._library.arena_open(found.placed_bytes, found.loose_bytes, found.small_bytes))

    def close(self) -> None:
        """Let the arena go, as soon as nothing is in it."""
        self._library.arena_close()


_arena: Arena | None = None


def take_over() -> Arena | None:
    """Have PyTorch's device memory come from `arena.c`, from now on until the process ends. Called before the device is
    used. None: it cannot be, and the log says why."""
    global _arena
    if _arena is None:
        try:
            _arena = Arena()
        except CannotTakeOverError as error:
            log.warning("device: PyTorch's own allocator stays, which loses more memory between tensors: %s", error)
    return _arena


def arena() -> Arena | None:
    """What `take_over` gave."""
    return _arena


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room. What an allocator throws that is not PyTorch's arrives as a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        type(error) is RuntimeError and str(error).startswith(_NO_MEMORY)
    )


class PlannedMemory:
    """The places of a plan."""

    def __init__(self, arena: Arena, program: Program, arrangement: Arrangement, slice_tokens: int) -> None:
        """`slice_tokens`: of the slices that are planned. Raises torch.OutOfMemoryError."""
        if not arena.open(arrangement):
            raise torch.OutOfMemoryError(f"{_NO_MEMORY}. The plan needs {arrangement.total_bytes} bytes in one piece.")
        self._arena, self._slice_tokens = arena, slice_tokens
        self._tokens: Sequence[int] = [slice_tokens] * program.slices * program.rounds
        self._items = {item: _as_c(places) for item, places in arrangement.standing.items()}
        self._steps = dict(_steps(program, arrangement.steps))

    def expect(self, op: Op | None) -> None:
        """What is allocated from now on is `op`'s, until the next call; None: it is in no plan."""
        if op is None:
            self._arena.expect(None, 0, 1, 1)
            return
        places, number = self._steps[op.name]
        tokens = self._slice_tokens if number is None else self._tokens[number]
        self._arena.expect(places, len(places), tokens, self._slice_tokens)

    def expect_item(self, item: str) -> None:
        """What is allocated next is the item, which is there between steps."""
        places = self._items.get(item)
        self._arena.expect(places, len(places) if places is not None else 0, 1, 1)

    def lengths(self, tokens: Sequence[int]) -> None:
        """The slices of the step to come have so many tokens, round by round."""
        self._tokens = tokens

    def close(self) -> None:
        """No more is expected. What is there stays as long as somebody uses it."""
        self._arena.close()


def _steps(
    program: Program, steps: Mapping[str, Sequence[Place]]
) -> Iterator[tuple[str, tuple[ctypes.Array[_Place], int | None]]]:
    """Operation -> what it allocates, and for which slice of the step."""
    made: dict[str, ctypes.Array[_Place]] = {}
    for op in program.ops:
        if op.queue is Queue.COMPUTE:
            key = key_of(op, program.rounds)
            if key not in made:
                made[key] = _as_c(steps.get(key, ()))
            k = _slice_of(op)
            yield op.name, (made[key], None if k is None else op.round * program.slices + k)


def _slice_of(op: Op) -> int | None:
    if op.kind is OpKind.RUN:
        return op.turn[2]
    return int(op.subject.rpartition(".")[2]) if op.subject.startswith("a:") else None


def _as_c(places: Sequence[Place]) -> ctypes.Array[_Place]:
    return (_Place * len(places))(*(_Place(p.bytes, p.offset, p.most) for p in places))


def _runtime() -> ctypes.CDLL:
    """CUDA's runtime, as PyTorch has loaded it."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line[line.find("/") :]
        if "/" in line and Path(path).name.startswith("libcudart.so"):
            return ctypes.CDLL(path)
    return ctypes.CDLL(None)


def _address(library: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found

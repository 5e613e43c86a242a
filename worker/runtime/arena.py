"""Puts tensors on the device in the places that the plan has for them: `arena.c` becomes PyTorch's CUDA allocator.

Only a custom allocator can decide addresses, and PyTorch accepts one only before anything has used the device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from planner.cpu import build
from planner.graph import EAGER, ask_allocator
from planner.schedule.allocations import allocations
from planner.schedule.chain import Chain, slice_size
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.items import Item
from planner.schedule.places import Arrangement, Place, few_rounds, key_of
from planner.schedule.shorter import places_of_shorter
from worker.runtime.driver import address_of, runtime

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("arena.c")
_DRIVER = ("cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaGetLastError")
_THROW = "_ZSt21__throw_runtime_errorPKc"  # std::__throw_runtime_error(char const*): C cannot throw by itself


class _Place(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "offset", "most")]


_NO_PLACES = (_Place * 0)()
_WRITTEN = 10_000  # the most allocations and frees of one operation
Shape = tuple[tuple[str, tuple[int, ...]], ...]
"""The shape of a slice: (name, shape) of each of its tensors."""


class CannotTakeOverError(Exception):
    """Raised where PyTorch's own CUDA allocator must stay in use; the message, for the log, says why."""


class Memory(Protocol):
    """Decides at which addresses of the device an engine's tensors lie. Only the thread that may allocate there calls
    its methods."""

    def expect(self, ops: Sequence[Op]) -> None:
        """Say that the allocations from now until the next call are those of `ops`, in this order. With `ops` empty,
        they are in no plan."""

    def expect_item(self, item: Item) -> None:
        """Say that the next allocations are for `item` (a weight, gradient or states), which stays on the device
        between steps."""

    def expect_sum(self, weight: str) -> None:
        """Say that the next allocation is the copy of the first gradient of `weight`, which becomes the sum over the
        slices. It happens within the operation that is expected."""

    def expect_loose(self) -> None:
        """Say that the allocations from now until the next call have no place in the plan. They are counted all the
        same."""

    def knows(self, shape: Shape) -> bool:
        """Whether `learn` has been called for slices (micro-batches) of this shape, or need not be."""

    def learn(self, shape: Shape, shorter: Chain | None) -> None:
        """Find places for the tensors of slices of this shape. They allocate what the lifetimes in the chain `shorter`
        say; None if that is not known."""

    def slices(self, shapes: Sequence[Shape]) -> None:
        """Say which shapes the next step's slices have, in order, round by round. `knows` must be True for each of
        them."""

    def close(self) -> None:
        """Stop expecting allocations. Memory in use is freed when the last tensor in it is."""


class NoPlaces:
    """The `Memory` of a plan without addresses: tensors lie wherever the allocator puts them."""

    def expect(self, ops: Sequence[Op]) -> None:
        """Do nothing: the plan has no places for these operations' tensors."""

    def expect_item(self, item: Item) -> None:
        """Do nothing: the plan has no place for the item."""

    def expect_sum(self, weight: str) -> None:
        """Do nothing: the plan has no place for the sum of the weight's gradients."""

    def expect_loose(self) -> None:
        """Do nothing: without a plan's places all allocations are alike."""

    def knows(self, shape: Shape) -> bool:
        """Return True: without places nothing must be learned about slices of a shape."""
        return True

    def learn(self, shape: Shape, shorter: Chain | None) -> None:
        """Do nothing: slices of this shape need no places."""

    def slices(self, shapes: Sequence[Shape]) -> None:
        """Do nothing: the next step's slices need no places."""

    def close(self) -> None:
        """Do nothing: no memory was reserved."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much device memory PyTorch's allocator, made from `arena.c`, has used so far.

    allocated, most_allocated    bytes of tensors, and the most since `reset_peaks`
    reserved, most_reserved      bytes taken from the CUDA driver, and the most since `reset_peaks`
    mallocs, frees               numbers of calls of the driver
    strays                       number of planned allocations that did not get their places since `Arena.open`
    """

    allocated: int
    most_allocated: int
    reserved: int
    most_reserved: int
    mallocs: int
    frees: int
    strays: int


class Arena:
    """The allocator of this process's device memory. It can put tensors at addresses that a plan chose."""

    def __init__(self) -> None:
        """Become PyTorch's allocator. Raises CannotTakeOverError."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise CannotTakeOverError("the device is in use already")
        try:
            self._library = library = build.load(SOURCE)
            cuda, thrower = runtime(), ctypes.CDLL("libstdc++.so.6")
            called = [address_of(cuda, name) for name in _DRIVER]
            library.arena_driver.argtypes = [ctypes.c_void_p] * 5
            library.arena_driver(*called, address_of(thrower, _THROW))
            library.arena_count.restype = ctypes.c_int64
            library.arena_limit.argtypes = [ctypes.c_int64]
            library.arena_open.argtypes = [ctypes.c_int64] * 3
            library.arena_expect.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2]
            library.arena_next.argtypes = [ctypes.c_int64]
            library.arena_write_down.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            library.arena_write_down.restype = ctypes.c_int64
            allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(library._name, "arena_allocate", "arena_free")
            allocator.allocator().set_record_stream_fn(address_of(library, "arena_record"))
            allocator.allocator().set_reset_fn(address_of(library, "arena_empty"))
            self.set_limit(None)
            torch.cuda.memory.change_current_allocator(allocator)
        except (build.CannotBuildError, AttributeError, OSError, RuntimeError) as error:
            raise CannotTakeOverError(str(error)) from error
        self.expect, self.expect_place = library.arena_expect, library.arena_next
        self.own_code = library.arena_own
        self._written = (ctypes.c_int64 * (2 * _WRITTEN))()
        ask_allocator(self)

    def begin(self) -> None:
        """Start logging allocations and frees (`planner.graph.AllocationLog`)."""
        self._library.arena_write_down(self._written, _WRITTEN)

    def end(self) -> list[tuple[int, int]]:
        """Stop logging. Returns (address, bytes) for each allocation and (address, 0) for each free, in the order in
        which they happened."""
        count = self._library.arena_write_down(None, 0)
        return [(self._written[2 * n], self._written[2 * n + 1]) for n in range(count)]

    def counts(self) -> Counts:
        """The bytes, calls and misplaced allocations so far."""
        return Counts(*(int(self._library.arena_count(number)) for number in range(len(fields(Counts)))))

    def set_limit(self, limit_bytes: int | None) -> None:
        """Limit the memory taken from the CUDA driver to `limit_bytes`; None removes the limit."""
        self._library.arena_limit(2**62 if limit_bytes is None else limit_bytes)

    def empty(self) -> None:
        """Return memory that no tensor uses to the CUDA driver."""
        self._library.arena_empty()

    def reset_peaks(self) -> None:
        """Start measuring the most allocated and reserved bytes anew."""
        self._library.arena_reset_peaks()

    def open(self, arrangement: Arrangement) -> bool:
        """Take the memory for `arrangement`, the planned addresses of a program's tensors, from the CUDA driver.
        Returns False if too little is free, or if an earlier arrangement's memory is still in use."""
        placed, loose, small = arrangement.placed_bytes, arrangement.loose_bytes, arrangement.small_bytes
        return bool(self._library.arena_open(placed, loose, small))

    def close(self) -> None:
        """Return the arrangement's memory as soon as no tensor uses it."""
        self._library.arena_close()


_arena: Arena | None = None


def take_over() -> Arena | None:
    """Make PyTorch allocate device memory through `arena.c` until the process ends. Must be called before the device is
    used. Returns the allocator; None where that is not possible, and the log says why."""
    global _arena
    if _arena is None:
        try:
            _arena = Arena()
        except CannotTakeOverError as error:
            log.warning("device: PyTorch's own allocator stays, which loses more memory between tensors: %s", error)
    return _arena


def arena() -> Arena | None:
    """The allocator that `take_over` installed in this process; None if there is none."""
    return _arena


class PlannedMemory:
    """The `Memory` of a plan with addresses: it puts an engine's tensors where the plan has their places."""

    def __init__(self, arena: Arena, program: Program, chain: Chain, arrangement: Arrangement) -> None:
        """Takes the arrangement's memory from the driver. Raises torch.OutOfMemoryError."""
        if not arena.open(arrangement):
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. The plan needs {arrangement.total_bytes} bytes in one piece."
            )
        self._arena, self._program, self._chain, self._arrangement = arena, program, chain, arrangement
        self._items = {item: _as_c(places) for item, places in arrangement.standing.items()}
        self._keys = {op.name: key_of(op, program.rounds) for op in program.ops if op.queue is Queue.COMPUTE}
        self._slice_of = {op.name: slice_of(op, program.slices) for op in program.ops if op.queue is Queue.COMPUTE}
        self._planned = {key: _as_c(arrangement.steps.get(key, ())) for key in self._keys.values()}
        self._several: dict[int, ctypes.Array[_Place]] = {}  # by the first operation's id
        self._shorter: dict[Shape, dict[str, ctypes.Array[_Place]]] = {}
        self._sums: dict[Shape | None, dict[str, dict[str, int]]] = {}  # None: of the planned shape
        self._sums[None] = _sums(program, chain, arrangement.small_bytes)
        self._its_sums: dict[str, int] = {}
        self._shapes: Sequence[Shape] = ()

    def expect(self, ops: Sequence[Op]) -> None:
        """Say that the allocations from now until the next call are those of `ops`, in this order. With `ops` empty,
        they are in no plan."""
        if not ops:
            self._arena.expect(None, 0, 0)
            return
        if len(ops) > 1:  # weights or gradients, whose sizes do not depend on the slices' shape
            places = self._several.get(id(ops[0])) or self._joined(ops)
            self._arena.expect(places, len(places), self._arrangement.small_bytes)
            return
        key, number = self._keys[ops[0].name], self._slice_of[ops[0].name]
        shape = self._shapes[number] if number is not None and self._shapes else None
        shorter = None if shape is None else self._shorter.get(shape)
        self._its_sums = self._sums.get(None if shorter is None else shape, {}).get(key, {})
        places = (self._planned if shorter is None else shorter)[key]
        self._arena.expect(places, len(places), self._arrangement.small_bytes if shorter is None else 0)

    def _joined(self, ops: Sequence[Op]) -> ctypes.Array[_Place]:
        """The places of all of `ops`, kept for later steps."""
        places = [place for op in ops for place in self._planned[self._keys[op.name]]]
        joined = self._several[id(ops[0])] = (_Place * len(places))(*places)
        return joined

    def expect_item(self, item: Item) -> None:
        """Say that the next allocations are for `item` (a weight, gradient or states), which stays on the device
        between steps."""
        places = self._items.get(item)
        count = len(places) if places is not None else 0
        self._arena.expect(places, count, self._arrangement.small_bytes)

    def expect_sum(self, weight: str) -> None:
        """Say that the next allocation is the copy of the first gradient of `weight`, which becomes the sum over the
        slices. It happens within the operation that is expected."""
        if (number := self._its_sums.get(weight)) is not None:
            self._arena.expect_place(number)

    def expect_loose(self) -> None:
        """Say that the allocations from now until the next call have no place in the plan. They are counted all the
        same."""
        self._arena.expect(_NO_PLACES, 0, 0)

    def knows(self, shape: Shape) -> bool:
        """Whether slices (micro-batches) of this shape have their places in the plan's memory, as far as they can have
        any."""
        return shape in self._shorter or slice_size(dict(shape)) == self._chain.slice_tokens

    def learn(self, shape: Shape, shorter: Chain | None) -> None:
        """Find places for the tensors of slices of this shape. They allocate what the lifetimes in the chain `shorter`
        say; None if that is not known."""
        if shorter is None:  # then the slice may use the places of the planned slices
            planned = self._arrangement.steps
            self._shorter[shape] = {key: _as_c(planned.get(key, ()), fewer=True) for key in self._planned}
        else:
            steps = places_of_shorter(self._program, self._chain, self._arrangement, shorter)
            self._shorter[shape] = {key: _as_c(steps[key]) for key in self._planned}
            self._sums[shape] = {
                key: {weight: _others(steps[key])[number] for weight, number in its.items()}
                for key, its in _sums(self._program, shorter, 0).items()
            }

    def slices(self, shapes: Sequence[Shape]) -> None:
        """Say which shapes the next step's slices have, in order, round by round. `knows` must be True for each of
        them."""
        self._shapes = shapes

    def close(self) -> None:
        """Stop expecting allocations. Memory in use is freed when the last tensor in it is."""
        self._arena.close()


def _sums(program: Program, chain: Chain, least: int) -> dict[str, dict[str, int]]:
    """Operation -> weight -> which of the operation's allocations of more than `least` bytes becomes the weight's sum.
    Only needed with own code, whose gradients come in an order that only autograd knows."""
    if EAGER.name not in program.options:
        return {}
    return {
        key_of(op, program.rounds): {
            event.sum_of: number
            for number, event in enumerate(event for event in events if event.bytes > least)
            if event.sum_of
        }
        for op, events in allocations(few_rounds(program), chain).steps
    }


def _others(places: Sequence[Place]) -> list[int]:
    """The numbers of the places that are not for what the operation allocates for itself."""
    return [number for number, place in enumerate(places) if not place.own]


def slice_of(op: Op, slices: int) -> int | None:
    """The number of the slice (micro-batch) within the step, from 0, that the operation is for; None if it is not for a
    single slice. `slices`: how many slices a step has."""
    if op.kind is not OpKind.RUN and not op.moves_activations:
        return None
    return op.round * slices + op.turn[2]


def _as_c(places: Sequence[Place], *, fewer: bool = False) -> ctypes.Array[_Place]:
    """The places for `arena.c`. `fewer`: allocations may be smaller than planned."""
    return (_Place * len(places))(*(_Place(p.bytes, p.offset, 2 if p.most else 1 if fewer else 0) for p in places))

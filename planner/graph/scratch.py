"""Measures scratch: the GPU memory that an operation allocates for itself and frees before it ends.

No trace shows scratch. For example, the backward of fused attention holds sums in fp32 and copies of tensors that are
not contiguous; a sum over rows has one part for each multiprocessor. Their size depends on the card, the kernel, the
version of PyTorch, and whether deterministic algorithms are on. So when an operation of a GPU's code is first seen, it
runs twice on sample data, and the allocator's history of the second run shows what was allocated and freed. The
planner does that, inside `trials`. A trainer must not: its memory is full, and each of its allocations has a planned
place.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.cpu.meter import Meter
from planner.errors import first_line
from planner.graph.sample import random_data
from planner.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)

_NOT_TRIED = frozenset(
    (
        torch.Tag.pointwise,  # one kernel, which needs no scratch
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,  # the host would wait for the result
    )
)
# These check the values of their data. On a GPU a failed check (a device assertion) ends all use of the device by this
# process.
_LOOK_AT_DATA = frozenset(
    (
        "masked_scatter",
        "masked_scatter_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "_assert_async",
        "segment_reduce",
        "_segment_reduce_backward",
    )
)
_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DEVICE_ERROR = re.compile(r"CUDA (driver )?error\b")
_ENTRIES = 100_000  # most entries in the history of one operation


@dataclass(frozen=True, slots=True)
class Scratch:
    """What one call of an operation allocates and frees, in order.

    events     (number, bytes) for an allocation, (number, 0) for its free; results are never freed
    results    number of an allocation -> index, among the leaves of the returned value, of the tensor that lies in it
    """

    events: tuple[tuple[int, int], ...]
    results: Mapping[int, int]

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated at one time during the call, results included."""
        sizes: dict[int, int] = {}
        most = 0
        for number, size in self.events:
            sizes[number] = size
            most = max(most, sum(sizes.values()))
        return most


class AllocationLog(Protocol):
    """Records the allocations and frees of the allocator of GPU memory in this process."""

    def begin(self) -> None:
        """Start recording allocations and frees of device memory."""

    def end(self) -> list[tuple[int, int]]:
        """Stop recording. Returns (address, bytes) for each allocation since `begin`, (address, 0) for each free, in
        order."""


class History:
    """An `AllocationLog` that reads the history of PyTorch's own allocator."""

    def begin(self) -> None:
        """Start recording. Raises RuntimeError if somebody else already records the allocator's history."""
        records = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # a private name of PyTorch
        if records is not None and records():
            raise RuntimeError("somebody else records the history of the allocator")
        record: Any = torch.cuda.memory._record_memory_history
        record("all", context=None, stacks="python", max_entries=_ENTRIES)  # C++ stacks would load symbols

    def end(self) -> list[tuple[int, int]]:
        """Stop recording. Returns (address, bytes) for each allocation since `begin`, (address, 0) for each free, in
        order."""
        memory: Any = torch.cuda.memory
        try:
            entries = memory._snapshot()["device_traces"][torch.cuda.current_device()]
        finally:
            memory._record_memory_history(None)
        sized = {"alloc": 1, "free_requested": 0}
        return [(e["addr"], sized[e["action"]] * e["size"]) for e in entries if e["action"] in sized]


_log: AllocationLog = History()
_known: dict[Any, Scratch | None] = {}
_trying = False


def ask_allocator(its: AllocationLog) -> None:
    """Read allocations from the log `its` from now on, because the process does not use PyTorch's own allocator."""
    global _log
    _log = its


def forget() -> None:
    """Forget the scratch of all operations measured so far."""
    _known.clear()


@contextlib.contextmanager
def trials(on: bool = True) -> Iterator[None]:
    """A context in which `scratch_of` may run operations on sample data, to measure the memory that they allocate for
    themselves, or (`on` is False) may not. Outside such a context it may not."""
    global _trying
    before, _trying = _trying, on
    try:
        yield
    finally:
        _trying = before


def are_on() -> bool:
    """Whether `scratch_of` may run operations on sample data now (see `trials`)."""
    return _trying


def scratch_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scratch | None:
    """The scratch (memory that an operation allocates for itself and frees before it ends) of a call of `func` with
    these arguments, whose tensors may be fake. The first call of a kind is run on sample data, later ones are looked
    up.

    None if the call allocates only its results, in their order; if it does not run on a GPU; if trials are off or not
    possible for this operation; or if the trial failed (the log then says why). Raises RuntimeError if an error has
    made the device unusable.
    """
    if not _trying or not _can_be_tried(func, args, kwargs):
        return None
    args, kwargs = _without_dropout(func, args, kwargs)
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    key = func, strict, _key(args), _key(kwargs)
    if key not in _known:
        try:
            _known[key] = _tried(func, args, kwargs)
        except RuntimeError as error:
            # An operation may refuse the sample data, which training will not give it, or may have no such kernel. That
            # is no reason to fail the plan: if the model really calls it so, training reports it. But after an error of
            # the device itself, such as an assertion in a kernel, nothing more can be measured in this process, and a
            # later error would blame something else.
            out_of_memory = is_out_of_memory(error)
            if not out_of_memory and _DEVICE_ERROR.match(first_line(error)):
                raise
            log.info("device: what %s allocates for itself is not known: %s", func, first_line(error))
            if out_of_memory:  # not remembered: next time there may be more room
                return None
            _known[key] = None
    return _known[key]


def let_go() -> None:
    """Free the GPU memory that trials of operations have left allocated: cuBLAS's workspaces and PyTorch's cache."""
    forget_workspaces()
    torch.cuda.empty_cache()


def forget_workspaces() -> None:
    """Free cuBLAS's workspaces: each thread has its own, and PyTorch keeps them when threads end."""
    if (clear := getattr(torch._C, "_cuda_clearCublasWorkspaces", None)) is not None:  # a private name of PyTorch
        clear()


class ScratchMeter(Meter):
    """A meter of allocated bytes that also counts the scratch of operations, in the order in which it is allocated and
    freed."""

    def come(self, size: int) -> int:
        """Count scratch of `size` bytes as allocated. Returns a number by which `go` knows it."""
        with self._lock:
            self.now += size
            self.peak, self._mark = max(self.peak, self.now), max(self._mark, self.now)
        return 0

    def go(self, number: int, size: int) -> None:
        """Count the scratch `number`, of `size` bytes, as freed."""
        with self._lock:
            self.now -= size

    def returned(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if (scratch := scratch_of(func, args, kwargs)) is not None:
            leaves = tree_leaves(result)
            allocated: dict[int, tuple[int, int]] = {}
            for number, size in scratch.events:
                if number in scratch.results:
                    if type(leaf := leaves[scratch.results[number]]) in self.counted:
                        self.add(leaf)
                elif size:
                    allocated[number] = self.come(size), size
                else:
                    self.go(*allocated.pop(number))
        super().returned(func, args, kwargs, result)


def estimate(func: Any, args: Sequence[Any]) -> Scratch | None:
    """The scratch that a GPU would need for a call of `func`, estimated from the shapes in a trace on the CPU; None if
    unknown. It is known only for the backward of attention, as flash attention computes it: dq in fp32, with rows and
    columns padded to its block sizes, and dk and dv of all heads where heads are grouped. The kernel for fp32 inputs
    needs about as much.

    Under deterministic algorithms flash attention holds several dq, enough to occupy all multiprocessors. The presets
    of cards do not say how many there are: the estimate is then too low.
    """
    if func is not _ON_CPU:
        return None
    query, key = args[1:3]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    results = [t.numel() * t.element_size() for t in args[1:4]]
    all_heads = [key.numel() * key.element_size() // key.shape[1] * heads] * 2 if key.shape[1] != heads else []
    sizes = [*results, 4 * rows, 4 * rows * _up(width, 32), *all_heads]
    goes = ((number, 0) for number in range(len(results), len(sizes)))
    return Scratch((*enumerate(sizes), *goes), {number: number for number in range(len(results))})


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _can_be_tried(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operation can run on sample data: it must be of aten, compute something, run on a GPU alone, and not
    check the values of its data."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func.is_view or _NOT_TRIED & set(func.tags):
        return False
    if func._schema.name.removeprefix("aten::").rstrip("_") in _LOOK_AT_DATA:
        return False
    if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func._schema.name:
        return False  # operations that draw random numbers check first that their data are probabilities
    leaves = tree_leaves((args, kwargs))
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    devices += [leaf for leaf in leaves if isinstance(leaf, torch.device)]
    return bool(devices) and all(device.type == "cuda" for device in devices)


def _without_dropout(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments with a dropout probability of 0, for attention. With dropout, attention draws random numbers, and
    the host reads a seed in memory that no trace shows. Scratch is the same without dropout."""
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return args, kwargs
    at = names.index("dropout_p")
    if at < len(args):
        return (*args[:at], 0.0, *args[at + 1 :]), kwargs
    return args, {**kwargs, "dropout_p": 0.0}


def _data(value: Tensor) -> Tensor:
    """Sample data laid out as `value`: random for floating point of two bytes or more, True for bool, else zeros. Data
    that are not random are filled in as bytes, which works for every dtype."""
    if value.dtype.is_floating_point and value.dtype.itemsize > 1:
        return random_data(value, value.device)
    size = value.untyped_storage().nbytes()
    memory = torch.full((size,), value.dtype == torch.bool, dtype=torch.uint8, device=value.device).view(value.dtype)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        storage = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device.type, storage
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, Mapping):
        return tuple((key, _key(each)) for key, each in value.items())
    return type(value), value


def _tried(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Scratch | None:
    with _aside():
        its, named = tree_map_only(Tensor, _data, (tuple(args), dict(kwargs)))
        func(*its, **named)  # the first call: libraries allocate what they keep for later ones
        _log.begin()
        try:
            result = func(*its, **named)
        finally:
            events = _log.end()
        torch.cuda.synchronize()  # so that an error of a kernel is raised here
        starts = [leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else 0 for leaf in tree_leaves(result)]
    return _read(events, starts)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """A context in which operations really run, unseen by traces and meters around it. Afterwards the random state is
    as before."""
    state = torch.cuda.get_rng_state()
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            yield
    finally:
        torch.cuda.set_rng_state(state)


def _read(log: Sequence[tuple[int, int]], starts: Sequence[int]) -> Scratch | None:
    """The scratch that the allocations in `log` show; None if only the results were allocated, in their order.
    `starts`: the address at which each result's memory begins, 0 for a result that is no tensor."""
    alive: dict[int, int] = {}
    lives: dict[int, tuple[int, bool]] = {}  # number -> bytes, whether it was freed
    order: list[tuple[int, bool]] = []
    for address, size in log:
        if size:
            alive[address] = number = len(lives)
            lives[number] = size, False
            order.append((number, True))
        elif (gone := alive.pop(address, None)) is not None:
            lives[gone] = lives[gone][0], True
            order.append((gone, False))
    results = {alive[start]: leaf for leaf, start in reversed([*enumerate(starts)]) if start in alive}
    inner = {number for number, (_, went) in lives.items() if went}
    if not inner and list(results.values()) == sorted(results.values()):
        return None
    counted = inner | results.keys()  # other allocations are kept by a library
    events = ((number, lives[number][0] if comes else 0) for number, comes in order if number in counted)
    return Scratch(tuple(events), results)

"""Counts the bytes of live tensors on a device, by storage. Where the CPU is the training device, the bytes that this
meter counts are the "device memory"."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.cpu.in_place_sums import adds_in_place


class Meter:
    """Counts the bytes of every storage that an operation returns inside a `watch()`, until the storage is freed.

    All threads share the counts. A dispatch mode belongs to one thread, so each thread that computes enters its own
    `watch()`; `host()` is per thread, too. Memory that operations allocate for themselves, and `resize_` of storages,
    are not counted.

    now         bytes alive
    peak        most bytes alive since the start or since `reset_peak()`
    """

    def __init__(self, device: str = "cpu", counted: tuple[type, ...] = (torch.Tensor, nn.Parameter)) -> None:
        """`device`: the type of device to count. `counted`: the exact tensor types to count; code that runs on fake
        tensors counts these, too."""
        self.device, self.counted = device, counted
        self.now = self.peak = self._mark = 0
        self._sizes: dict[int, int] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Re-entrant: a garbage collection inside `add` may free other storages in the same thread.
        self._lock = threading.RLock()
        self._thread = threading.local()

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of `tensor`, if it is on the device and not counted yet."""
        if tensor.device.type != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key in self._sizes:
                return
            size = 0 if getattr(self._thread, "on_host", False) else storage.nbytes()
            self._sizes[key] = size
            self._alive[key] = weakref.ref(storage, functools.partial(self._drop, key))
            self.now += size
            self.peak = max(self.peak, self.now)
            self._mark = max(self._mark, self.now)

    def _drop(self, key: int, _: object) -> None:
        with self._lock:
            self.now -= self._sizes.pop(key)
            del self._alive[key]

    def returned(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count the tensors in `result`, which the operation `func` has returned. Subclasses also use the arguments."""
        for leaf in tree_leaves(result):
            if type(leaf) in self.counted:
                self.add(leaf)

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """The bytes counted for the storage of `tensor`; 0 if it is host memory or was never seen."""
        return self._sizes.get(tensor.untyped_storage()._cdata, 0)

    def mark(self, *, alive: bool = True) -> int:
        """The most bytes alive since the last mark; sets a new mark. `alive`: the new mark starts from the bytes alive
        now. False: it starts from 0, so that the next mark gives the most bytes alive at a moment at which something
        was allocated, 0 if nothing was."""
        with self._lock:
            peak, self._mark = self._mark, self.now if alive else 0
            return peak

    def reset_peak(self) -> None:
        """Let `peak` start again from the bytes that are alive now."""
        with self._lock:
            self.peak = self.now

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """A context in which storages that this thread makes count as host memory: they are never counted."""
        before = getattr(self._thread, "on_host", False)
        self._thread.on_host = True
        try:
            yield
        finally:
            self._thread.on_host = before

    def watch(self) -> contextlib.AbstractContextManager[object]:
        """A context in which this thread's operations are counted."""
        return _Watch(self)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.meter = meter

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if adds_in_place(func, args, kwargs):
            return torch.ops.aten.add_.Tensor(*args)
        result = func(*args, **(kwargs or {}))
        self.meter.returned(func, args, kwargs or {}, result)
        return result

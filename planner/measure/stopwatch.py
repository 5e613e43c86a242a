"""Measures seconds on a device, and warms the device up until its clock is as under load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from planner.out_of_memory import as_one_error

log = logging.getLogger(__name__)

_BUSY_S = 1e-3  # the least that the device is kept busy while more is issued
_MOST_ISSUING_S = 0.05  # of a block; longer issuing has loaded kernels for the first time
_CYCLES_PER_S = 2e9  # of a device, roughly
_SIDE = 4096  # of the matrices whose products warm a device up
_PRODUCTS, _MOST_TIMES = 8, 16  # in each timing, and the most timings
_ALIKE = 0.03


class Stopwatch:
    """Measures the seconds of a function on a device: by events on CUDA, where the host only issues, else by the clock.

    `issued_s`: seconds that the host spent on issuing the last function; 0 where the host computes.
    """

    def __init__(self, device: torch.device, *, behind: bool = False) -> None:
        """`behind`: the device begins when all is issued. Otherwise it may wait for the host; that time counts."""
        self.device, self.issued_s, self._behind = device, 0.0, behind

    @as_one_error()
    def seconds(self, function: Callable[[], object]) -> float:
        """Run `function` and wait for it: the seconds that it keeps the device busy. Raises torch.OutOfMemoryError
        where the device has no room, whichever library says so."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if self._behind:
            keep_busy(self.issued_s)
        before.record(torch.cuda.current_stream(self.device))
        begin = time.perf_counter()
        function()
        self.issued_s = time.perf_counter() - begin
        after.record(torch.cuda.current_stream(self.device))
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def keep_busy(seconds: float) -> None:
    """Let the device sleep for twice `seconds` and a little more, so that it does not wait for work that is issued
    meanwhile. `seconds` counts at most as long as issuing takes that loads no kernels."""
    if sleep := getattr(torch._C, "_cuda_sleep", None):  # internal to PyTorch: a later version may not have it
        sleep(int((2 * min(seconds, _MOST_ISSUING_S) + _BUSY_S) * _CYCLES_PER_S))


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Let the device compute until its clock has risen: products in `dtype`, eight in each timing, until two successive
    timings differ by at most 3%, or there were sixteen. Does nothing on the CPU. Where the device has no room for the
    products, later measurements may be slower than its clock allows."""
    if device.type != "cuda":
        return
    try:
        with as_one_error():
            a, b = (torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(2))

        def products() -> None:
            for _ in range(_PRODUCTS):
                a @ b  # each product is freed before the next

        warm_up_by(Stopwatch(device), products)
    except torch.OutOfMemoryError:
        log.warning("device: no room to warm up by %s products of %d by %d, measured as it is", dtype, _SIDE, _SIDE)


def warm_up_by(watch: Stopwatch, work: Callable[[], object]) -> int:
    """Repeat `work` until two successive timings differ by at most 3%, or there were 16; returns their number."""
    before = watch.seconds(work)
    for count in range(2, _MOST_TIMES + 1):
        now = watch.seconds(work)
        if abs(now - before) <= _ALIKE * before:
            return count
        before = now
    return _MOST_TIMES

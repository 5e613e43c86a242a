"""Seconds that a device takes, once its clock is where work keeps it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from planner.out_of_memory import as_one_error

log = logging.getLogger(__name__)

_BUSY_S = 1e-3  # the least that the device is kept busy while more is issued
_MOST_ISSUING_S = 0.05  # of a block; one that took longer to issue has loaded its kernels, for the first time
_CYCLES_PER_S = 2e9  # of a device, about
_SIDE = 4096  # of the products that warm a device up
_PRODUCTS, _MOST_TIMES = 8, 16  # of one time, and as many times at most
_ALIKE = 0.03


class Stopwatch:
    """Seconds of a function on a device: by events where the device works by itself, else by the clock.

    `issued_s`: what the host spent on issuing it the last time; 0 where the host computes.
    """

    def __init__(self, device: torch.device, *, behind: bool = False) -> None:
        """`behind`: the device begins when all is issued. Else it waits for the host in between, and that counts."""
        self.device, self.issued_s, self._behind = device, 0.0, behind

    @as_one_error()
    def seconds(self, function: Callable[[], object]) -> float:
        """How long `function` keeps the device busy; returns when it is done. Raises torch.OutOfMemoryError where the
        device has no room, whoever says so."""
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
    """Give the device nothing to compute for twice as long, and a little: so that it does not wait for what is issued
    meanwhile. Of `seconds` no more count than issuing takes that loads no kernels."""
    if sleep := getattr(torch._C, "_cuda_sleep", None):  # PyTorch's own, which a later one may not have
        sleep(int((2 * min(seconds, _MOST_ISSUING_S) + _BUSY_S) * _CYCLES_PER_S))


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Let the device compute until its clock has risen: products in `dtype`, eight at a time, until two such times
    differ by 3% at most, or there were sixteen. Nothing to do on the CPU; where the device has no room for them, what
    is measured may be slower than its clock allows."""
    if device.type != "cuda":
        return
    try:
        with as_one_error():
            a, b = (torch.randn(_SIDE, _SIDE, device=device).to(dtype) for _ in range(2))

        def products() -> None:
            for _ in range(_PRODUCTS):
                a @ b  # one at a time is there

        warm_up_by(Stopwatch(device), products)
    except torch.OutOfMemoryError:
        log.warning("device: no room to warm up by %s products of %d by %d, measured as it is", dtype, _SIDE, _SIDE)


def warm_up_by(watch: Stopwatch, work: Callable[[], object]) -> int:
    """Do `work` until two successive times of it are alike, or it was done often enough: how often it was."""
    before = watch.seconds(work)
    for count in range(2, _MOST_TIMES + 1):
        now = watch.seconds(work)
        if abs(now - before) <= _ALIKE * before:
            return count
        before = now
    return _MOST_TIMES

"""Measures seconds on a device, and warms the device up until its clock rate is as under load."""

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
    """Measures how many seconds a function takes on a device: by events on CUDA, where the host only issues work, else
    by the clock.

    `issued_s`: seconds that the host spent issuing the last function's work; 0 where the host itself computes.
    """

    def __init__(self, device: torch.device, *, behind: bool = False) -> None:
        """`behind`: the device starts only when all work is issued, so that it never waits for the host. Otherwise it
        may wait, and that time counts."""
        self.device, self.issued_s, self._behind = device, 0.0, behind

    @as_one_error()
    def seconds(self, function: Callable[[], object]) -> float:
        """Run `function`, wait until the device has finished, and return the seconds that the device took. Raises
        torch.OutOfMemoryError if the device has no room, whichever library reports that."""
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
    """Let the device sleep for twice `seconds` and a little more, so that it starts late and never waits for work that
    is issued meanwhile. `seconds`: how long issuing takes; capped, because issuing that loads kernels for the first
    time takes far longer."""
    if sleep := getattr(torch._C, "_cuda_sleep", None):  # internal to PyTorch: a later version may not have it
        sleep(int((2 * min(seconds, _MOST_ISSUING_S) + _BUSY_S) * _CYCLES_PER_S))


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Run matrix products on the device until its clock rate has risen: products in `dtype`, eight per timing, until
    two successive timings differ by at most 3%, at most 16 timings. Does nothing on the CPU. If the device has no room
    for the products, it logs a warning and leaves the device as it is."""
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
    """Run and time `work` until two successive timings differ by at most 3%, at most 16 times. Returns the number of
    timings."""
    before = watch.seconds(work)
    for count in range(2, _MOST_TIMES + 1):
        now = watch.seconds(work)
        if abs(now - before) <= _ALIKE * before:
            return count
        before = now
    return _MOST_TIMES

"""Measures or estimates the seconds of optimizer steps whose duration depends on the tensor's size, for the sizes of
the job's tensors."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from planner.codec import to_json
from planner.machine.hardware import Hardware
from planner.measure.stopwatch import Stopwatch
from planner.measure.times import UpdateTimes
from planner.optimizers.base import Optimizer
from planner.out_of_memory import as_one_error
from planner.schedule.chain import Tensor

_REPEATS = 3


def untimed_updates(tensors: Iterable[Tensor]) -> tuple[UpdateTimes, ...]:
    """The optimizer steps of `tensors` that need seconds of their own, each pair of optimizer and size once, in a
    fixed order. Their seconds are not yet filled in."""
    updates = {UpdateTimes(optimizer=t.optimizer, elements=t.elements) for t in tensors if t.optimizer.own_seconds}
    return tuple(sorted(updates, key=lambda update: str(to_json(update))))


def estimate_updates(updates: Sequence[UpdateTimes], hardware: Hardware) -> tuple[UpdateTimes, ...]:
    """`updates`, the optimizer steps, with seconds estimated from their arithmetic and memory traffic."""
    return tuple(replace(its, optimizer=its.optimizer.estimated(its.elements, hardware)) for its in updates)


def measure_updates(
    updates: Sequence[UpdateTimes], device: torch.device, hardware: Hardware
) -> tuple[UpdateTimes, ...]:
    """`updates`, the optimizer steps, with seconds measured on the device and on the CPU. One that does not fit the
    device's memory is estimated."""
    measured = []
    for its in estimate_updates(updates, hardware):
        cpu_s = _seconds(its.optimizer, its.elements, torch.device("cpu"))
        try:
            gpu_s = _seconds(its.optimizer, its.elements, device) if device.type == "cuda" else cpu_s
        except torch.OutOfMemoryError:
            gpu_s = its.optimizer.gpu_s
        measured.append(replace(its, optimizer=its.optimizer.timed(gpu_s=gpu_s, cpu_s=cpu_s)))
    return tuple(measured)


@torch.no_grad()
@as_one_error()
def _seconds(optimizer: Optimizer, elements: int, device: torch.device) -> float:
    update, share = optimizer.trial(elements, device)
    watch = Stopwatch(device)
    runs = [watch.seconds(update) for _ in range(1 + _REPEATS)]
    return statistics.median(runs[1:]) * share

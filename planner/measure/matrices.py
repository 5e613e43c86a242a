"""How long Muon's updates take: measured on matrices of the job's own shapes, or estimated."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import torch

from planner.cpu.muon import Matrix, update
from planner.machine.hardware import Hardware
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.measure.stopwatch import Stopwatch
from planner.measure.times import MatrixTimes
from planner.muon import CALLS, MOMENTUM, TRAFFIC_BYTES, flops
from planner.out_of_memory import as_one_error
from planner.schedule.chain import Tensor

_CALL_S = 5e-6
_CPU_FLOPS_PER_S = 4e11
"""Of products in bf16 on a usual desktop's processor. A core with AVX-512 was seen to do 90 to 370 GFLOP/s; those
without convert what they multiply, and do a quarter of that."""
_MOST_FLOPS = {"cpu": 2e10, "cuda": 1e13}  # of what is measured: larger matrices are taken for as fast
_REPEATS = 3


def shapes_of(tensors: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """(shorter side, elements) of what Muon updates, each once."""
    return tuple(sorted({(t.shorter_side, t.elements) for t in tensors if t.is_matrix}))


def estimate_updates(shapes: Sequence[tuple[int, int]], hardware: Hardware) -> tuple[MatrixTimes, ...]:
    """By arithmetic and memory traffic. `shapes`: (shorter side, elements) of each matrix."""

    def seconds(side: int, elements: int, parameters_per_s: float, flops_per_s: float) -> float:
        moving = TRAFFIC_BYTES * elements / (UPDATE_TRAFFIC_BYTES * parameters_per_s)
        return max(CALLS * _CALL_S, moving + (flops(side, elements) / flops_per_s if flops_per_s else 0.0))

    return tuple(
        MatrixTimes(
            shorter_side=side, elements=elements,
            gpu_s=seconds(side, elements, hardware.gpu_update_parameters_per_s, hardware.flops_per_s),
            cpu_s=seconds(side, elements, hardware.cpu_update_parameters_per_s, _CPU_FLOPS_PER_S),
        )
        for side, elements in shapes
    )  # fmt: skip


def measure_updates(
    shapes: Sequence[tuple[int, int]], device: torch.device, hardware: Hardware
) -> tuple[MatrixTimes, ...]:  # fmt: skip
    """On the device and on the CPU. What does not fit the device is estimated."""
    found = []
    for times in estimate_updates(shapes, hardware):
        cpu_s = _seconds(times.shorter_side, times.elements, torch.device("cpu"))
        try:
            gpu_s = _seconds(times.shorter_side, times.elements, device) if device.type == "cuda" else cpu_s
        except torch.OutOfMemoryError:
            gpu_s = times.gpu_s
        found.append(MatrixTimes(shorter_side=times.shorter_side, elements=times.elements, gpu_s=gpu_s, cpu_s=cpu_s))
    return tuple(found)


@torch.no_grad()
@as_one_error()
def _seconds(side: int, elements: int, device: torch.device) -> float:
    """Of a matrix with these sides, or where that takes long of one with smaller sides, times the arithmetic."""
    longer, whole = elements // side, flops(side, elements)
    while side > 1 and flops(side, side * longer) > _MOST_FLOPS[device.type]:
        side, longer = side // 2, longer // 2
    weight, momentum, gradient = (torch.randn(side, longer, device=device) for _ in range(3))
    matrix = Matrix("probe", 0.1, weight, weight, momentum, gradient)
    watch, runs = Stopwatch(device), list[float]()
    for _ in range(1 + _REPEATS):
        runs.append(watch.seconds(lambda: update(matrix, learning_rate=1e-3, momentum=MOMENTUM)))
    return statistics.median(runs[1:]) * whole / flops(side, side * longer)

"""Computes how long a run's steps took, and how long they were predicted to take, from the run's events. Imports no
torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_COLD_STEPS = 2
_FEW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Median seconds of a run's steps, measured and predicted, over the same `steps` steps; and the largest device
    memory of steps and evaluations. None: not known.

    A step's time covers its forward, backward and updates; evaluations, samples and checkpoints lie between steps. Two
    sorts of steps are left out: the first two after a start, in which blocks are traced, and steps in which every
    allocation on the device is counted, because counting takes time. If there are no other steps, the counted ones are
    used, and without these the first two. `free`: the medians are over steps of neither sort.
    """

    step_s: float | None
    predicted_step_s: float | None
    steps: int
    gpu_peak_bytes: int | None
    free: bool

    @property
    def steady(self) -> bool:
        """Whether these times are reliable: there are enough steps, and nothing but training took time in them."""
        return self.free and self.steps >= _FEW


def step_times(events: Iterable[Mapping[str, Any]]) -> StepTimes:
    """The step times from events of metrics.jsonl: a consecutive series, or the first event and some later ones."""
    free: list[Mapping[str, Any]] = []
    metered: list[Mapping[str, Any]] = []
    cold: list[Mapping[str, Any]] = []
    peaks: list[int] = []
    start = 0
    for event in events:
        if event["event"] == "start":
            start = event["step"]
        elif event["event"] == "step":
            (cold if event["step"] <= start + _COLD_STEPS else metered if event.get("metered") else free).append(event)
        if event["event"] in ("step", "eval", "projectors") and event.get("gpu_peak_bytes") is not None:
            peaks.append(event["gpu_peak_bytes"])
    steps = free or metered or cold
    return StepTimes(
        step_s=_median(steps, "step_s"),
        predicted_step_s=_median(steps, "predicted_step_s"),
        steps=len(steps),
        gpu_peak_bytes=max(peaks, default=None),
        free=bool(free),
    )


def _median(steps: list[Mapping[str, Any]], name: str) -> float | None:
    values = [step[name] for step in steps if step.get(name) is not None]
    return statistics.median(values) if values else None

"""Writes figures of the daemon and its jobs in Prometheus's text format, for programs that monitor machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offmated.api.views import job_view
from offmated.jobs.listing import count_by_state, working
from offmated.jobs.states import JobState
from offmated.jobs.store import Store

Json = dict[str, Any]

_GAUGES = {
    "offmate_job_step": ("Steps done of a job that is being worked on.", ("progress", "step")),
    "offmate_job_steps": ("Steps it will have.", ("progress", "total_steps")),
    "offmate_job_loss": ("Its last training loss.", ("progress", "loss")),
    "offmate_job_eval_loss": ("Its last evaluation loss.", ("progress", "eval_loss")),
    "offmate_job_rewards_margins": ("The last step's mean margin of rewards.", ("progress", "rewards_margins")),
    "offmate_job_rewards_accuracies": (
        "The share of the last step's pairs whose chosen answer had the greater reward.",
        ("progress", "rewards_accuracies"),
    ),
    "offmate_job_eval_rewards_margins": ("The last evaluation's mean margin.", ("progress", "eval_rewards_margins")),
    "offmate_job_eval_rewards_accuracies": (
        "The last evaluation's share of such pairs.",
        ("progress", "eval_rewards_accuracies"),
    ),
    "offmate_job_remaining_seconds": ("Seconds until its end, as it looks now.", ("progress", "eta_s")),
    "offmate_job_step_seconds": ("Seconds a step takes.", ("measured", "step_s")),
    "offmate_job_predicted_step_seconds": ("Seconds a step was to take.", ("predicted", "step_s")),
    "offmate_job_gpu_peak_bytes": ("The most GPU memory it used.", ("measured", "gpu_peak_bytes")),
    "offmate_job_predicted_gpu_peak_bytes": ("The most it was to use.", ("predicted", "gpu_peak_bytes")),
}


def figures(store: Store, health: Json) -> str:
    """The figures of the daemon and its jobs, in Prometheus's text format 0.0.4."""
    return "".join(f"{line}\n" for line in _lines(store, health))


def _lines(store: Store, health: Json) -> Iterator[str]:
    yield from _described("offmate_start_time_seconds", "gauge", "When the daemon started, in seconds since 1970.")
    yield _sample("offmate_start_time_seconds", {}, health["started_at"])
    yield from _described("offmate_child_restarts_total", "counter", "How often a child was started again.")
    for name, child in sorted(health["children"].items()):
        yield _sample("offmate_child_restarts_total", {"child": name}, child["restarts"])
    counts = count_by_state(store)
    yield from _described("offmate_jobs", "gauge", "Jobs by state.")
    for state in JobState:
        yield _sample("offmate_jobs", {"state": state}, counts.get(state, 0))
    views = [job_view(job) for job in working(store)]
    for name, (text, (part, key)) in _GAUGES.items():
        pairs = [(view, value) for view in views if (value := (view[part] or {}).get(key)) is not None]
        if pairs:
            yield from _described(name, "gauge", text)
        for view, value in pairs:
            yield _sample(name, {"job": str(view["id"]), "name": view["name"]}, value)


def _described(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {float(value)!r}" if shown else f"{name} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

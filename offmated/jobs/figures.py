"""Reads from a run's files how many steps it has and how fast they are, and keeps the results until a file changes."""

from __future__ import annotations

import statistics
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from planner.errors import UserError
from planner.keys.preference import REFERRING
from planner.keys.source import read_text, read_yaml
from planner.run.events import EVAL_PAIR_FIGURES, PAIR_FIGURES
from planner.run.folder import RunFolder
from planner.run.step_times import StepTimes, step_times
from planner.units import format_seconds

Json = dict[str, Any]
_T = TypeVar("_T")

KEPT_FILES = 512
_DISK_BYTES_PER_S = 400e6  # assumed for a disk that nobody has measured: what a SATA disk writes, or less
DAMAGED = (OSError, LookupError, TypeError, ValueError, AttributeError, UserError)
"""The errors that reading raises for files that cannot be opened, or whose content is not as it should be."""
_STEPS_UNSEEN = 2  # a stop may come as a step begins, and a run's first steps take longer
_SPARE_S = 15.0  # for the processes to end
_PLAN_FIELDS = (
    "slices",
    "rounds",
    "clip",
    "source",
    "step_s",
    "lp_step_s",
    "bound_s",
    "solver_gap",
    "gpu_peak_bytes",
    "cpu_peak_bytes",
    "gpu_budget_bytes",
    "cpu_budget_bytes",
)


@dataclass(frozen=True, slots=True)
class Steps:
    """A summary of a run's metrics.jsonl: only a few numbers, as it is kept for many jobs. `between_s`: the longest
    time from one step to the next among the recent steps, with evaluations but without saves, in seconds. `save_s`: the
    seconds of the longest recent save."""

    progress: Json | None
    times: StepTimes
    between_s: float | None = None
    save_s: float | None = None


NO_STEPS = Steps(None, step_times(()))


def steps_of(run: RunFolder) -> Steps:
    """Read the run's metrics.jsonl and summarize it."""
    return _steps.get(run, run.metrics)


def plan_of(run: RunFolder) -> Json | None:
    """The figures of the run's plan.json that people see; None before there is one."""
    return _plans.get(run, run.plan)


def why_replaced(first: Json, second: Json) -> str:
    """A text on why a job's `first` plan was replaced by its `second`, both as `plan_of` gives them. "" unless an
    estimate was replaced by a plan from measurements."""
    if first["measured"] or not second["measured"]:
        return ""
    before, now = (format_seconds(plan["step_s"]) for plan in (first, second))
    return (
        "the first plan was an estimate, made without measuring, to tell early whether the job fits; a plan from "
        f"measured blocks replaces it (a step: {before} by the estimate, {now} by measurements)"
    )


def left_s(run: RunFolder) -> float | None:
    """The seconds for which a job still needs the GPU, by its measured step time, else by the plan's; None where the
    number of its steps, or their time, is not known yet."""
    steps, plan = steps_of(run), plan_of(run)
    step_s = steps.times.step_s or (plan or {}).get("step_s")
    progress = steps.progress
    total = progress["total_steps"] if progress is not None else _lengths.get(run, run.resolved)
    done = run.last_checkpoint_step() or 0 if progress is None else progress["step"]
    return None if step_s is None or total is None else max(0, total - done) * step_s


def stop_s(run: RunFolder) -> float:
    """The most seconds that a job should need, when asked to stop at any moment, to save a checkpoint and leave the
    GPU."""
    steps, plan = steps_of(run), plan_of(run) or {}
    step_s = steps.between_s or _STEPS_UNSEEN * (steps.times.step_s or plan.get("step_s") or 0.0)
    save_s = steps.save_s or plan.get("cpu_peak_bytes", 0) / _DISK_BYTES_PER_S
    return 1.1 * (step_s + save_s) + _SPARE_S


class _Kept(Generic[_T]):
    """Values read from files, each read again when its file has changed. Keeps only the last version of a file, and
    the files used last, at most `KEPT_FILES`."""

    def __init__(self, read: Callable[[RunFolder], _T]) -> None:
        self._read = read
        self._found: OrderedDict[Path, tuple[_Version, _T]] = OrderedDict()
        self._lock = threading.Lock()  # answers are made in several threads

    def get(self, run: RunFolder, file: Path) -> _T:
        version = _version(file)
        with self._lock:
            if (entry := self._found.get(file)) is not None and entry[0] == version:
                self._found.move_to_end(file)
                return entry[1]
        value = self._read(run)
        with self._lock:
            self._found[file] = (version, value)
            while len(self._found) > KEPT_FILES:
                self._found.popitem(last=False)
        return value


_Version = tuple[int, int] | None
"""When a file was last written, and its size; None when there is none."""


def _version(path: Path) -> _Version:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def _read_plan(run: RunFolder) -> Json | None:
    """Figures of plan.json: the file may be large and seldom changes."""
    document = run.read_plan()
    if document is None:
        return None
    plan = document["plan"]
    return {name: plan[name] for name in _PLAN_FIELDS} | {
        "blocks": len(plan["options"]),
        "options": dict(Counter(plan["options"])),
        "measured": document["measured"],
        "cached": document["cached"],
        "solve_s": document["solve_s"],
    }


def _read_steps(run: RunFolder) -> Steps:
    events = run.recent_metrics()
    times = step_times(events)
    first = step_times(run.first_metrics()).gpu_peak_bytes  # only the first steps of a run are metered
    peaks = [peak for peak in (first, times.gpu_peak_bytes) if peak is not None]
    return Steps(_progress(events), replace(times, gpu_peak_bytes=max(peaks, default=None)), *_pauses(events))


def _read_length(run: RunFolder) -> int | None:
    """The steps that a job asks for; None where it asks for epochs, as its rows are not counted yet, and where a
    reference model scores all of these rows before the first step."""
    values = read_yaml(read_text(run.resolved, longest=None), run.resolved.name, longest=None).values
    total = values.get("max_steps")
    return total if isinstance(total, int) and values.get("preference") not in REFERRING else None


_plans = _Kept(_read_plan)
_steps = _Kept(_read_steps)
_lengths = _Kept(_read_length)


def _progress(events: list[Json]) -> Json | None:
    started = [number for number, event in enumerate(events) if event["event"] == "start"]
    if not started:
        return None
    start = events[started[-1]]
    total = start["total_steps"]
    steps = [event for event in events[started[-1] :] if event["event"] == "step"]  # those before may be repeated
    evaluations = [event for event in events if event["event"] == "eval"]
    times = [event["step_s"] for event in steps if event.get("step_s") is not None]
    return {
        "step": steps[-1]["step"] if steps else start["step"],
        "total_steps": total,
        "loss": steps[-1].get("loss") if steps else None,
        "eval_loss": evaluations[-1].get("eval_loss") if evaluations else None,
        "step_s": statistics.median(times) if times else None,
        **_those(PAIR_FIGURES, steps),
        **_those(EVAL_PAIR_FIGURES, evaluations),
    }


def _those(names: Sequence[str], events: list[Json]) -> Json:
    """Those figures with these `names` that the last event has."""
    return {name: events[-1][name] for name in names if name in events[-1]} if events else {}


def _pauses(events: Sequence[Json]) -> tuple[float | None, float | None]:
    """The longest time from one step to the next without the save between them, and the longest save. The time between
    two starts does not count."""
    between, saves = [0.0], [0.0]
    step_at = before_at = None
    saved_s = 0.0
    for event in events:
        at = event.get("time")
        if event["event"] == "start" or not isinstance(at, (int, float)):
            step_at = before_at = None
            continue
        if event["event"] == "checkpoint" and before_at is not None:
            saved_s = at - before_at
            saves.append(saved_s)
        if event["event"] == "step":
            between.append(at - step_at - saved_s if step_at is not None else 0.0)
            step_at, saved_s = at, 0.0
        before_at = at
    return max(between) or None, max(saves) or None

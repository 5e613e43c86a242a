"""Builds the JSON object by which the API describes a job, from the job's row in the database and its run folder."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offmated.jobs.again import tried_at
from offmated.jobs.figures import NO_STEPS, Steps, plan_of, steps_of
from offmated.jobs.hub import waits_for_hub
from offmated.jobs.job_text import settings_in
from offmated.jobs.listing import Listed
from offmated.jobs.queue_changes import too_short
from offmated.jobs.room import waiting_words
from offmated.jobs.states import FINAL, TAKEN_FROM, Hold, JobState, StopReason
from offmated.jobs.table import JobRow
from offmated.repeated_errors import RepeatedErrors
from planner.run.events import PAIR_FIGURES
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.run.step_times import StepTimes
from planner.units import format_seconds, printable

Json = dict[str, Any]

_errors = RepeatedErrors()
_RECENT_LINES = 20

_ROW_FIELDS = (
    "id",
    "name",
    "state",
    "stop_reason",
    "priority",
    "run_dir",
    "created_at",
    "started_at",
    "ended_at",
    "attempts",
    "history",
    "crashes",
    "last_checkpoint_step",
    "exit_code",
    "error",
    "notes",
    "label",
    "hold",
    "after_id",
    "begin_at",
    "window",
)


def job_view(job: Listed) -> Json:
    """The JSON object by which `GET /jobs/{id}` describes a job. Some of its fields:

    place                its place among the jobs that are not over, from 1; null when it is over
    predicted, measured  {"step_s", "gpu_peak_bytes"}, each null when not known; both `step_s` are medians of the same
                         steps, measured["steps"] is their number (see `planner.run.step_times`)
    progress             {"step", "total_steps", "loss", "eval_loss", "step_s", "eta_s"} or null; with preferences also
                         those of the last step and evaluation that are in `planner.run.events.PAIR_FIGURES`
    standing             its state in a word or two for people, or what keeps it in that state, like "paused";
                         `reason` may begin with the same word
    settings             the settings of --set that override its file, each "KEY=VALUE"
    kept                 whether something keeps a waiting job from starting now; `reason` says what
    plan                 figures of plan.json, "options": {name: count of blocks}, "measured", "cached", "solve_s"
    output               the model folder, when there is one
    expected             {"starts_at", "ends_at", "nights"} as `offmated.jobs.queue_forecast.Expected` has them
    """
    row = job.row
    view = {name: getattr(row, name) for name in _ROW_FIELDS}
    if row.state in TAKEN_FROM:  # the row's error is that of the process before
        view["error"] = None
    if _is_left_alone(row):
        view["state"] = TAKEN_FROM[row.state]
    view |= {"reason": _reason(job), "place": job.place, "output": (row.result or {}).get("output")}
    view |= {"standing": _standing(row, view["state"]), "settings": settings_in(row.notes or ())}
    view["expected"] = asdict(job.expected)
    view["kept"] = view["state"] in TAKEN_FROM.values() and bool(_kept(job))
    # Damaged files of one job must not keep anybody from seeing the other jobs.
    with _errors.of(f"reading {row.run_dir}", KeyError, TypeError, ValueError, OSError):
        run = RunFolder(Path(row.run_dir))
        steps = steps_of(run)
        if steps.progress is not None and _is_starting(row):  # only the step from which it goes on is known yet
            behind = {"step": row.history[-1]["from_step"] or 0, "loss": None, "step_s": None}
            known = {name: value for name, value in steps.progress.items() if name not in PAIR_FIGURES}
            steps = replace(steps, progress=known | behind)
        return view | _figures(row, steps, plan_of(run))
    return view | _figures(row, NO_STEPS, None)


def _figures(row: JobRow, steps: Steps, plan: Json | None) -> Json:
    progress = steps.progress
    if progress is not None:
        remaining, seconds = progress["total_steps"] - progress["step"], progress["step_s"]
        progress = progress | {"eta_s": remaining * seconds if seconds is not None and row.state not in FINAL else None}
    return {"plan": plan, "progress": progress, **_compared(row, plan, steps.times)}


def _compared(row: JobRow, plan: Json | None, times: StepTimes) -> Json:
    """The prediction and the measurement of the same steps; before there are any, the plan's prediction."""
    if (end := row.result) is not None:  # figures of the whole run and of the plan it ran under
        return {
            "predicted": {"step_s": end.get("predicted_step_s"), "gpu_peak_bytes": end.get("predicted_gpu_peak_bytes")},
            "measured": {
                "step_s": end.get("step_s"),
                "steps": end.get("measured_steps", 0),
                "gpu_peak_bytes": end.get("gpu_peak_bytes"),
            },
        }
    planned = plan or {"step_s": None, "gpu_peak_bytes": None}
    return {
        "predicted": {
            "step_s": times.predicted_step_s or planned["step_s"],
            "gpu_peak_bytes": planned["gpu_peak_bytes"],
        },
        "measured": {"step_s": times.step_s, "steps": times.steps, "gpu_peak_bytes": times.gpu_peak_bytes},
    }


def _is_left_alone(row: JobRow) -> bool:
    """Whether the process that worked on the job is gone although the database does not say so yet, for example because
    its disk is full."""
    if row.state not in TAKEN_FROM or row.owner is None:
        return False
    try:
        return not Process.parse(row.owner).alive()
    except ValueError:  # a damaged row: no process has that name
        return True


_HOLDS = {Hold.PAUSED: "paused", Hold.HELD: "held", Hold.NO_ROOM: "waiting for room"}


def _standing(row: JobRow, state: JobState) -> str:
    if state in TAKEN_FROM:
        return "stopping" if row.stop_reason is not None else state
    return _HOLDS.get(row.hold, state) if row.hold is not None and state not in FINAL else state


def _reason(job: Listed) -> str:
    """Why the job is where it is, in a few words; "" where the state says it all."""
    row = job.row
    if row.state in FINAL:
        return str(row.error["what"]) if row.error else ""
    if _is_left_alone(row):
        return "its process has ended; it goes on once the database has taken that"
    if row.state in TAKEN_FROM:
        if row.stop_reason is not None:
            return _STOPS[row.stop_reason]
        return _asks(row) or "; ".join(filter(None, (_scoring(row), _again(row))))
    worker = "planner" if row.state is JobState.SUBMITTED else "GPU"
    return "; ".join(filter(None, (_kept(job) or f"goes to the {worker} next", _again(row))))


_STOPS = {
    StopReason.CANCEL: "is being cancelled",
    StopReason.SHUTDOWN: "saves a checkpoint to stop",
    StopReason.PAUSE: "saves a checkpoint to pause",
    StopReason.WINDOW: "saves a checkpoint before its window's end",
    StopReason.YIELD: "saves a checkpoint to leave the GPU to another program",
}


def _asks(row: JobRow) -> str:
    """In words, that a job being planned asks the hub again, which was not reached before; "" for other jobs."""
    return "asks the hub again" if row.state is JobState.PLANNING and waits_for_hub(row.error) else ""


def _kept(job: Listed) -> str:
    """What a job waits for, in words; "" where it is next. What only a person can end comes before the
    rest."""
    row = job.row
    if job.paused:
        return "the machine is paused: offmate resume"
    if row.hold is Hold.NO_ROOM:
        return _room(row)
    if row.hold is Hold.NO_HUB:
        return f"waits for the hub; tried again at {tried_at(row.error)}"
    if row.hold is not None:
        return f"paused: offmate resume {row.id}" if row.hold is Hold.PAUSED else f"held: offmate release {row.id}"
    if row.state is JobState.WAITING and job.yields:
        return "another program uses the GPU: goes on when it has been idle for a while"
    if row.state is JobState.WAITING and job.after is not None:
        if job.after in FINAL:
            return f"job {row.after_id} is {job.after}: offmate retry {row.after_id}, or offmate release {row.id}"
        return f"begins after job {row.after_id}, which is {job.after}"
    if row.state is JobState.WAITING and (short := _too_short(row)):
        return short
    if row.state is JobState.WAITING and row.begin_at is not None and row.begin_at > time.time():
        times = job.expected
        if times.starts_at is not None and times.ends_at is None and not times.nights:  # `expected` says when it begins
            return f"waits for its window {row.window}" if row.window else "waits for its time"
        return f"begins at {time.strftime('%Y-%m-%d %H:%M', time.localtime(row.begin_at))}"
    worker = "planner" if row.state is JobState.SUBMITTED else "GPU"
    if job.ahead:
        return f"waits for the {worker}, {job.ahead + len(job.busy)} before it"
    return f"waits for job {job.busy[0]}" if job.busy else ""


def _too_short(row: JobRow) -> str:
    """In words, that a job's window is too short for it ever to begin; "" for other jobs."""
    if (seconds := too_short(row)) is None:
        return ""
    has_s, needed_s = seconds
    return (
        f"its window {row.window} has {format_seconds(has_s)}, and a step and a save take up to "
        f"{format_seconds(needed_s)}: it never begins; offmate release {row.id} leaves the window out"
    )


def _room(row: JobRow) -> str:
    """What is missing on a job's disk, in words."""
    try:
        return waiting_words(row.error)
    except OSError as broken:
        return f"waiting for room: {broken}"


def _is_starting(row: JobRow) -> bool:
    """Whether a job is in a later attempt whose trainer is still loading, and has not begun to go on."""
    return row.attempts >= 2 and _is_silent(row)


def _is_silent(row: JobRow) -> bool:
    """Whether a running job's trainer has written no event yet in this attempt."""
    if row.state is not JobState.RUNNING or not row.history:
        return False
    with suppress(OSError, TypeError):  # a damaged row, too
        return bool(RunFolder(Path(row.run_dir)).metrics_end() <= row.history[-1]["metrics_from"])
    return False


def _scoring(row: JobRow) -> str:
    """How far the reference model is with its scores of the answers, which come before the first event and may take
    hours: the trainer's last words on it, like "reference: 120 of 900 rows, 4 min left"; "" for other jobs."""
    if _is_silent(row):
        with suppress(OSError):
            for line in reversed(RunFolder(Path(row.run_dir)).tail_of_log(_RECENT_LINES)):
                _, _, said = line.partition(" ")  # the time comes first
                if said.startswith("reference: "):
                    return printable(said)
                if line.startswith("[offmate]"):  # what is above it is of an earlier attempt, or the planner's
                    break
    return ""


def _again(row: JobRow) -> str:
    """For a job with earlier attempts, in words: the number of this attempt, where it begins, and how the last one
    ended; "" for others."""
    ended = [attempt for attempt in row.history if attempt["ended_at"] is not None]
    if not ended:
        return ""
    running = row.state is JobState.RUNNING
    step = row.history[-1]["from_step"] if running else row.last_checkpoint_step
    number = row.attempts if running else row.attempts + 1
    origin = "from the start" if step is None else f"from step {step}"
    starts = ("begins again; " if step is None else "is being resumed; ") if _is_starting(row) else ""
    return f"{starts}attempt {number}, {origin}; before: {ended[-1]['ending']}"

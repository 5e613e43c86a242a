"""Turns what the API says of jobs into words and tables. A `job` is the JSON object that `GET /jobs/{id}` returns."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offmated.cli.output import coloured, pairs, shorten, table
from offmated.cli.plan_view import plan_rows
from offmated.jobs.states import FINAL, Hold, JobState
from planner.errors import Exit, UserError
from planner.run.events import pair_words
from planner.run.folder import RunFolder
from planner.units import counted, format_bytes, format_bytes_down, format_seconds

Json = dict[str, Any]
SHOWN_SETTING = 40  # characters of each setting in a list
_SCORING = re.compile(r"reference: \d+ of \d+ rows, [^;]* left")
FIRST_STEPS = 10
"""After so many steps a new job has shown that it runs."""


def exit_code(job: Json) -> Exit:
    """The exit code by which a command tells how the job ended."""
    if job["state"] == JobState.DONE:
        return Exit.DONE
    return Exit(job["error"]["exit_code"]) if job["error"] else Exit.FAILED


def submitted(job: Json) -> RenderableType:
    """The text printed after a submission: number, place in the queue, folder, notes, and the commands that people want
    next."""
    number = job["id"]
    rows = [("run folder", job["run_dir"])]
    rows += [("held", f"until offmate release {number}")] if job["hold"] == Hold.HELD else []
    rows += [("window", job["window"])] if job["window"] else []
    rows += [row for row in [_when(job)] if row[1]]
    rows += [("note", note) for note in job["notes"]]
    commands = ("offmate status", f"offmate logs -f {number}", f"offmate show {number}", f"offmate cancel {number}")
    rows.append(("next", " · ".join(commands)))
    return Group(f"Job {number} ({job['name']}) is submitted, place {job['place']} in the queue.", pairs(rows))


def first_steps_done(job: Json) -> bool:
    """Whether a job has done enough steps to show that it runs."""
    figures = job["progress"]
    return figures is not None and figures["step"] >= min(FIRST_STEPS, figures["total_steps"])


def rehearsed(job: Json) -> RenderableType:
    """The last text of `offmate submit`, if it followed the job's first steps."""
    number, name = job["id"], f"Job {job['id']}"
    if job["state"] in FINAL:
        return ended(job)
    if job["hold"]:
        return f"{name} is queued and {job['reason']}"
    if job["kept"]:
        return f"{name} is queued and starts by itself later: {job['reason']}.  offmate logs -f {number}"
    if text := scoring(job):
        return f"{name} scores its answers before the first step; {text}. It goes on.  offmate logs -f {number}"
    took = job["progress"]["step_s"]
    each = f", {format_seconds(took)} each" if took else ""
    by = f" and is {' '.join(_when(job))}" if expected(job) else ""
    steps = job["progress"]["step"]
    return f"{name} has done its first {counted(steps, 'step')}{each}. It goes on{by}.  offmate logs -f {number}"


def changed(job: Json) -> str:
    """The text printed after a change of when the job may start (hold, pause, move, …)."""
    number, state = job["id"], job["state"]
    if state in (JobState.PLANNING, JobState.RUNNING) and job["stop_reason"]:
        return f"Job {number} {job['reason']}."
    if state == JobState.PLANNING:
        return f"Job {number} is being planned{f', and then waits: offmate resume {number}' if job['hold'] else ''}."
    if state == JobState.RUNNING:  # without a stop reason yet, as the daemon stops it a moment later
        return f"Job {number} {'saves a checkpoint and pauses' if job['hold'] else 'runs'}."
    return f"Job {number} is {job['standing']}, place {job['place']}: {reason(job)}."


def released(job: Json, window: str | None) -> str:
    """The text printed after `offmate release`. `window`: the hours to which the job was limited before, which
    `release` removes, too."""
    text = changed(job)
    return f"{text} Its window {window} no longer counts." if window and not job["window"] else text


def cancelled(job: Json) -> str:
    """The text printed after `offmate cancel`."""
    if job["state"] == JobState.CANCELLED:
        return f"Job {job['id']} is cancelled.  {_again(job)}"
    again = f"offmate retry {job['id']} goes on from its last checkpoint, or without one from the start."  # it may save
    return f"Job {job['id']} {job['reason'] or 'is being cancelled'}.  Then {again if job['attempts'] else _again(job)}"


def ended(job: Json) -> RenderableType:
    """The last text of `offmate run`, after the job's end."""
    if job["state"] == JobState.DONE:
        return f"Job {job['id']} is done; the model is in {job['output']}"
    error = f"\n{UserError.from_json(job['error'])}" if job["error"] else ""
    how = "has failed" if job["state"] == JobState.FAILED else "is cancelled"
    return f"Job {job['id']} {how}.{error}\n{_again(job)}"


def _again(job: Json) -> str:
    if job["error"] and job["error"]["exit_code"] == Exit.DOES_NOT_FIT:  # it would end the same way
        return f"offmate retry {job['id']} --gpu-budget SIZE tries it again with another budget."
    if not job["attempts"]:  # there is nothing to try again
        return f"offmate retry {job['id']} puts it into the queue again."
    if (step := job["last_checkpoint_step"]) is None:
        return f"offmate retry {job['id']} starts it again from the start: it has no checkpoint."
    return f"offmate retry {job['id']} goes on from step {step}, its last checkpoint."


def jobs(rows: list[Json], label: str | None = None) -> RenderableType:
    """A table of jobs, one per row. `label`: the label that was asked for."""
    if not rows and label is not None:
        return f"No job has the label {label}.  offmate status"
    if not rows:
        return "No jobs.  offmate submit job.yaml"
    lines = [
        (
            str(job["id"]),
            _named(job),
            coloured(job["standing"]),
            progress(job),
            remaining(job),
            expected(job),
            reason(job),
        )
        for job in rows
    ]
    return table(("ID", "NAME", "STATE", "PROGRESS", "LEFT", "DONE BY", "REASON"), lines)


def _named(job: Json) -> str:
    """ "notes [night] learning_rate=0.0001": the job's name, its label, and its settings of --set."""
    label = [f"[{job['label']}]"] if job["label"] else []
    return " ".join((job["name"], *label, *(shorten(setting, SHOWN_SETTING) for setting in job["settings"])))


def reason(job: Json) -> str:
    """Why the job is in its state: the API's `reason`, without its first word if that is the job's `standing`, shown
    already."""
    return str(job["reason"]).removeprefix(f"{job['standing']}: ")


def progress(job: Json) -> str:
    """The job's progress as a text like "120/200 60% loss 2.31 eval 2.45", or ""."""
    figures = job["progress"]
    if not figures:
        return ""
    text = f"{figures['step']}/{figures['total_steps']} {100 * figures['step'] // figures['total_steps']}%"
    for name, value, prefix in (("loss", figures["loss"], ""), ("eval", figures["eval_loss"], "eval_")):
        if value is not None:
            text = " ".join((text, f"{name} {value:.3f}", *pair_words(figures, prefix)))
    return text


def scoring(job: Json) -> str:
    """How far the reference model is with its scores, before the first step: a text like "reference: 120 of 900 rows, 4
    min left", or ""."""
    found = _SCORING.match(job["reason"])
    return found.group() if found else ""


def remaining(job: Json) -> str:
    """The time that a running job still needs, as text, or ""."""
    figures = job["progress"]
    if not figures or not figures["eta_s"] or job["state"] != JobState.RUNNING:
        return ""
    return format_seconds(figures["eta_s"])


def expected(job: Json) -> str:
    """When the job is expected to end, as a text like "06:40", "Tue 06:40, 3 nights", "many nights" or "begins 23:00",
    or "" where it cannot be known."""
    times = job["expected"]
    if times["ends_at"] is not None:
        return wall(times["ends_at"]) + (f", {counted(times['nights'], 'night')}" if times["nights"] > 1 else "")
    if times["nights"]:
        return "many nights"
    begun = job["state"] == JobState.RUNNING
    return f"begins {wall(times['starts_at'])}" if times["starts_at"] is not None and not begun else ""


def _when(job: Json) -> tuple[str, str]:
    """A name and a value: "done by" and when the job is done, or "begins" and when it begins."""
    text = expected(job)
    begins = text.removeprefix("begins ")
    return ("done by" if text == begins else "begins"), begins


def wall(unix: float) -> str:
    """The time `unix` (seconds since 1970) as local time, rounded up to a minute: "06:40" within a day, "Tue 06:40"
    within a week, else with its date."""
    unix = -(-unix // 60) * 60
    away = abs(unix - time.time())
    return time.strftime(
        "%H:%M" if away < 86400 else "%a %H:%M" if away < 6 * 86400 else "%Y-%m-%d %H:%M", time.localtime(unix)
    )


def plan(answer: Json) -> RenderableType:
    """The text that `offmate plan` prints for the planner's answer."""
    return pairs(plan_rows(answer))


def job(view: Json, plan: Json | None) -> RenderableType:
    """Everything that `offmate show` prints about one job. `plan`: its plan.json, if it has one."""
    rows: list[tuple[str, str | Text]] = [
        ("job", f"{view['id']} ({view['name']})"),
        ("state", coloured(view["standing"])),
        ("reason", reason(view)),
        ("label", view["label"] or ""),
        ("set", ", ".join(view["settings"])),
        ("priority", str(view["priority"] or "")),
        ("progress", progress(view)),
        ("left", remaining(view)),
        _when(view),
        ("window", view["window"] or ""),
        ("submitted", moment(view["created_at"])),
        ("started", moment(view["started_at"])),
        *_attempts(view),
        ("ended", moment(view["ended_at"])),
        ("run folder", view["run_dir"]),
        ("model folder", view["output"] or ""),
    ]
    rows += plan_rows(plan) if plan else _asked(RunFolder(Path(view["run_dir"])))
    rows += [("step time", step_time(view)), ("GPU peak", gpu_peak(view))]
    lines: list[RenderableType] = [pairs([(name, value) for name, value in rows if value])]
    if view["error"]:
        lines += ["", str(UserError.from_json(view["error"]))]
    return Group(*lines)


def retried(job: Json) -> str:
    """The text printed after `offmate retry`."""
    step = job["last_checkpoint_step"]
    origin = "starts again from the start: it has no checkpoint" if step is None else f"goes on from step {step}"
    waits = f": {reason(job)}" if job["kept"] else ""
    return f"Job {job['id']} {origin}; place {job['place']} in the queue{waits}."


def _attempts(job: Json) -> Iterator[tuple[str, str]]:
    """A line for each attempt, where there was more than one, or where the only one did not end well."""
    history = job["history"]
    if len(history) == 1 and job["state"] in (JobState.RUNNING, JobState.DONE):
        return
    for attempt in history:
        name = "" if attempt["number"] > 1 else "attempts"
        origin = "from the start" if attempt["from_step"] is None else f"from step {attempt['from_step']}"
        yield name, f"{attempt['number']}  {moment(attempt['started_at'])}, {origin}{_ending(attempt)}"


def _ending(attempt: Json) -> str:
    if attempt["ended_at"] is None:
        return ""
    reached, saved = attempt["reached_step"], attempt["checkpoint_step"]
    to = "" if reached is None else f" to step {reached}"
    new = "" if saved in (None, attempt["from_step"], reached) else f" (saved at {saved})"
    return f"{to}{new}, {moment(attempt['ended_at'])}: {attempt['ending']}"


def _asked(run: RunFolder) -> list[tuple[str, str | Text]]:
    """The job file and its budgets, for a job without a plan to show."""
    from planner.job.schema import Job  # late: importing it takes half of a command's start

    rows: list[tuple[str, str | Text]] = [("job file", str(run.submitted))]
    try:
        submitted = Job.from_resolved(run.resolved)
    except UserError:  # its files have gone since
        return rows
    budgets = (("GPU budget", submitted.gpu_budget), ("host budget", submitted.cpu_budget))
    return rows + [(name, "not given" if size is None else format_bytes_down(size)) for name, size in budgets]


def moment(unix: float | None) -> str:
    """The time `unix` (seconds since 1970) as local date and time, or "" for None."""
    return "" if unix is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def step_time(job: Json) -> str:
    """The predicted and the measured time of a step, as text. Where the prediction differs from the plan's, it says
    that shorter rows are the reason."""
    full_s, predicted_s = (job["plan"] or {}).get("step_s"), job["predicted"]["step_s"]
    rows = ""
    if full_s and predicted_s and abs(predicted_s - full_s) > 0.01 * full_s:
        rows = f" for rows of this length ({format_seconds(full_s)} if full)"
    steps = job["measured"].get("steps", 0)
    return _against(job, "step_s", format_seconds, rows) + (f", median of {steps} steps" if steps > 1 else "")


def gpu_peak(job: Json) -> str:
    """The predicted and the measured peak of GPU memory, as text."""
    return _against(job, "gpu_peak_bytes", format_bytes)


def _against(job: Json, figure: str, shown: Callable[[Any], str], of: str = "") -> str:
    predicted, measured = job["predicted"][figure], job["measured"][figure]
    if predicted is None:
        return ""
    if measured is None:
        return f"{shown(predicted)} predicted{of}, not measured" + ("" if job["state"] in FINAL else " yet")
    off = f" ({100 * (measured - predicted) / predicted:+.1f}%)" if predicted else ""
    return f"{shown(predicted)} predicted{of}, {shown(measured)} measured{off}"

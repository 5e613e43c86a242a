"""Writes the morning's report: what jobs did recently, in a few lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from offmated.api.views import job_view
from offmated.jobs import listing
from offmated.jobs.states import TAKEN_FROM, JobState
from offmated.jobs.store import Store
from planner.run.events import pair_words
from planner.units import counted, format_seconds

Json = dict[str, Any]

MOST = 20
_NEXT = 5


def report(store: Store, since: float) -> Json:
    """The report as {"since", "title", "lines"}. The lines tell of the last `MOST` jobs that ended after `since`
    (seconds since 1970), in the order in which they ended, of the jobs that run now, and of those that come next."""
    counts = listing.count_by_state(store, ended_since=since)
    over = [job_view(job) for job in listing.ended_since(store, since, MOST, newest=True)]
    queue = listing.queue(store, limit=_NEXT + 2)
    before = sum(counts.values()) - len(over)
    lines = [f"{before} that ended before these: offmate status --all"] if before > 0 else []
    lines += [_over(job) for job in over]
    waiting = 0
    for job in map(job_view, queue.jobs):
        if job["state"] in TAKEN_FROM:
            lines.append(f"now: {_named(job)}{_progress(job)}{_until(job)}")
        elif waiting < _NEXT:
            waiting += 1
            lines.append(f"next: {_named(job)}{_until(job) or ': ' + job['reason']}")
    more = queue.total - len(queue.jobs)
    lines += [f"and {more} more"] if more > 0 else []
    return {"since": since, "title": _title(counts, queue.total), "lines": lines}


def outcome(job: Json) -> str:
    """How one job ended, as the title of a message."""
    return f"job {job['id']} ({job['name']}) " + ("is done" if job["state"] == JobState.DONE else "has failed")


def _title(counts: Mapping[JobState, int], waiting: int) -> str:
    states = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)
    ended = ", ".join(f"{counts[state]} {state}" for state in states if state in counts) or "no job has ended"
    return f"{ended}; " + (f"{waiting} in the queue" if waiting else "the queue is empty")


def _over(job: Json) -> str:
    if job["state"] != JobState.DONE:
        return f"{_named(job)}: {job['state']}" + (f": {job['error']['what']}" if job["error"] else "")
    return f"{_named(job)}: " + "; ".join(("done", *_figures(job)))


def _figures(job: Json) -> Iterator[str]:
    progress, measured_s, planned_s = job["progress"], job["measured"]["step_s"], job["predicted"]["step_s"]
    if progress:
        for name, value, prefix in (("loss", progress["loss"], ""), ("evaluation", progress["eval_loss"], "eval_")):
            if value is not None:
                yield ", ".join((f"{name} {value:.3f}", *pair_words(progress, prefix)))
    if measured_s is not None:
        planned = f", planned {format_seconds(planned_s)}" if planned_s is not None else ""
        steps = f"{counted(progress['total_steps'], 'step')} of" if progress else "a step took"
        yield f"{steps} {format_seconds(measured_s)}{planned}"
    if (energy := _energy(job["history"])) is not None:
        yield energy
    if job["started_at"] is not None and job["ended_at"] is not None:
        yield f"{format_seconds(job['ended_at'] - job['started_at'])} from its start to its end"


def _energy(history: list[Json]) -> str | None:
    """The energy that the GPU took in all attempts, in words. It is not known of attempts whose worker was killed."""
    known = [attempt["energy_j"] for attempt in history if attempt.get("energy_j") is not None]
    if not known:
        return None
    return f"{'at least ' if len(known) < len(history) else ''}{sum(known) / 3.6e6:.3g} kWh on the GPU"


def _named(job: Json) -> str:
    return f"{job['id']} {job['name']}"


def _progress(job: Json) -> str:
    progress = job["progress"]
    if not progress:
        return ""
    loss = () if progress["loss"] is None else (f"loss {progress['loss']:.3f}", *pair_words(progress))
    return ", ".join(("", f"step {progress['step']} of {progress['total_steps']}", *loss))


def _until(job: Json) -> str:
    expected = job["expected"]
    if expected["ends_at"] is None:
        return ", done after many nights" if expected["nights"] else ""
    nights = f", {counted(expected['nights'], 'night')}" if expected["nights"] > 1 else ""
    return f", done by {time.strftime('%a %H:%M', time.localtime(expected['ends_at'] + 59))}{nights}"

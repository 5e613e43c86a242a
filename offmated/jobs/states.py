"""The states of a job and the events that take it from one to another, in one table. `offmated/jobs/store.py` has the
one function that writes states.

submitted ─> planning ─> waiting ─> running ─> done
     ^─────────┘            ^─────────┘          (back: it was stopped, or its process died; it goes on later)
running may become submitted: it ran out of memory, and is planned again with less
every state that is not final may also become cancelled or failed
failed and cancelled: a person may send the job back to submitted, or to waiting if its plan still holds
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import Exit, disk_full
from planner.hub import NOT_REACHED
from planner.run.oom import KILLED_FOR_MEMORY
from planner.system import signals
from planner.units import counted

LARGEST_ID = 2**31 - 1  # the largest number that the column `jobs.id` can hold in every database
MOST_PRIORITY = 1000
DISK_FULL = "disk-full"
CRASH_LIMIT = 3  # a job fails after so many deaths of its process without a new checkpoint


class JobState(StrEnum):
    """The state of a job. A SUBMITTED job is due for the planner, a WAITING job is planned and due for the GPU."""

    SUBMITTED = "submitted"
    PLANNING = "planning"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class StopReason(StrEnum):
    """The reason for which the daemon stops a job. CANCEL: for good, without waiting for a checkpoint. SHUTDOWN, PAUSE,
    WINDOW (its hours are over), YIELD (another program wants the GPU): with a checkpoint, to go on later."""

    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    PAUSE = "pause"
    WINDOW = "window"
    YIELD = "yield"


class Hold(StrEnum):
    """The reason for which a job that is not over does not start. HELD, PAUSED: a user held or paused it, and has to
    release or resume it. NO_ROOM: its disk lacks the space that it needs. NO_HUB: the hub was not reached; it waits
    until it asks again."""

    HELD = "held"
    PAUSED = "paused"
    NO_ROOM = "no-room"
    NO_HUB = "no-hub"


class Event(StrEnum):
    """An event that changes a job's state. TAKE: a worker begins to work on it. FINISH: the worker's process has done
    its work. RETURN: that process ended before its work was done, and the job goes on later. LESS: the job ran out of
    memory, and is planned again with less. PLAN and TRAIN: a user has the job tried again, by the planner or on the
    GPU."""

    TAKE = "take"
    FINISH = "finish"
    RETURN = "return"
    LESS = "less"
    FAIL = "fail"
    CANCEL = "cancel"
    PLAN = "plan"
    TRAIN = "train"


_AT_ANY_TIME = {Event.FAIL: JobState.FAILED, Event.CANCEL: JobState.CANCELLED}
_BY_A_PERSON = {Event.PLAN: JobState.SUBMITTED, Event.TRAIN: JobState.WAITING}

TRANSITIONS: dict[JobState, dict[Event, JobState]] = {
    JobState.SUBMITTED: {Event.TAKE: JobState.PLANNING, **_AT_ANY_TIME},
    JobState.PLANNING: {Event.FINISH: JobState.WAITING, Event.RETURN: JobState.SUBMITTED, **_AT_ANY_TIME},
    JobState.WAITING: {Event.TAKE: JobState.RUNNING, **_AT_ANY_TIME},
    JobState.RUNNING: {
        Event.FINISH: JobState.DONE,
        Event.RETURN: JobState.WAITING,
        Event.LESS: JobState.SUBMITTED,
        **_AT_ANY_TIME,
    },
    JobState.DONE: {},
    JobState.FAILED: _BY_A_PERSON,
    JobState.CANCELLED: _BY_A_PERSON,
}
"""State -> event -> new state. A transition that is not here does not happen. The constants below are derived from it.
"""

NEXT = {state: frozenset(events.values()) for state, events in TRANSITIONS.items()}

FINAL = frozenset(state for state, events in TRANSITIONS.items() if Event.CANCEL not in events)
"""The states in which a job is over: it stays there until a person tries it again."""

AGAIN = frozenset(state for state, events in TRANSITIONS.items() if Event.TRAIN in events)
TAKEN_FROM = {events[Event.TAKE]: state for state, events in TRANSITIONS.items() if Event.TAKE in events}
"""A state in which a process works on the job -> the state in which the job is due for it."""

PASSING = {DISK_FULL: Hold.NO_ROOM, NOT_REACHED: Hold.NO_HUB}
"""Code of an error that does not fail a job -> the hold that keeps the job from starting until the error has passed."""

_STOPS = {
    StopReason.SHUTDOWN: "stopped with the daemon",
    StopReason.PAUSE: "paused",
    StopReason.WINDOW: "saved before its window's end",
    StopReason.YIELD: "left the GPU to another program",
}
_STOPPED = (Exit.STOPPED, *(-number for number in signals("SIGTERM", "SIGKILL")), None)
"""The exit codes of a process that the daemon stops: its own, those of signals, and None if it ended with its
worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The way in which a job's planner or trainer process ended.

    `process` is the one that ended last, "planner", "data" or "trainer". `exit_code` is negative where a signal ended
    it, and None where its watcher died with it. `progressed`: there is a checkpoint that was not there when the process
    began. `blameless`: it went down with the daemon or the machine. `error`: its last UserError, in its JSON form.
    `log`: the last lines of its log. `less`: the job was out of memory, and gets less memory for its next plan."""

    process: str
    exit_code: int | None
    progressed: bool = False
    blameless: bool = False
    error: dict[str, Any] | None = None
    log: tuple[str, ...] = ()
    less: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The consequence of a process's end for its job: the job's new state, and its new count of `crashes`. `error`: why
    the job failed or, with a `hold`, the error that has to pass before it goes on."""

    state: JobState
    crashes: int
    error: dict[str, Any] | None = None
    hold: Hold | None = None


def judge(phase: JobState, stop: StopReason | None, crashes: int, ending: Ending) -> Verdict:
    """Decide what happens to a job whose process ended in `phase` (PLANNING or RUNNING), after `crashes` earlier
    crashes. `stop`: why the process was asked to stop; None if it was not.

    Finished work stays finished, even when a stop came late. An error that a person has to correct is final. Deaths are
    final only at `CRASH_LIMIT`. A full disk or a hub that is not reached is never final: the job waits until it has
    passed. After a failure without an explanation the job is tried again if there is a new checkpoint. Without a new
    checkpoint that failure is final, since the job would fail at the same step again."""
    code, since = ending.exit_code, 0 if ending.progressed else crashes
    event, error, held = Event.RETURN, None, None
    if code == Exit.DONE and not (phase is JobState.PLANNING and stop is StopReason.CANCEL):
        event, since = Event.FINISH, 0
    elif stop is StopReason.CANCEL:
        event = Event.CANCEL
    elif ending.less:
        event, since = Event.LESS, 0
    elif code is not None and code > 0 and code != Exit.STOPPED:
        event, error = Event.FAIL, ending.error or _unexplained(ending)
        if (held := PASSING.get(str(error.get("code")))) is not None:
            event = Event.RETURN
        elif ending.error is None and ending.progressed:
            event, error = Event.RETURN, None
    else:
        if stop is None and not ending.blameless and not (code == Exit.STOPPED and ending.progressed):
            since += 1
        if since >= CRASH_LIMIT:
            event, error = Event.FAIL, _crashed(ending, since)
    return Verdict(state=TRANSITIONS[phase][event], crashes=since, error=error, hold=held)


def account(stop: StopReason | None, ending: Ending) -> str:
    """How a process ended, in the words that logs and displays use. `stop`: why it was asked to stop; None if it was
    not."""
    code, who = ending.exit_code, f"the {ending.process}"
    if code == Exit.DONE:
        return f"{who} is done"
    if stop is StopReason.CANCEL:
        return "cancelled"
    if stop is not None and code in _STOPPED:
        return _STOPS[stop]
    if code is None:
        return "went down with the daemon or the machine" if ending.blameless else "went down with its worker"
    if code < 0 and (ending.error or {}).get("code") == KILLED_FOR_MEMORY:
        return f"{who} was killed by the kernel for its memory"
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name} (signal {-code})"
    if code == Exit.STOPPED:
        return f"{who} was stopped from outside"
    return f"{who} failed: {ending.error['what']}" if ending.error else f"{who} failed with exit code {code}"


def _unexplained(ending: Ending) -> dict[str, Any]:
    if ending.exit_code == Exit.NO_ROOM_TO_SAY:
        return disk_full(OSError(f"the {ending.process} could not write its error either")).to_json()
    return {
        "what": f"The {ending.process} ended with exit code {ending.exit_code}.",
        "numbers": list(ending.log),
        "hint": "the job's log says more",
        "code": f"{ending.process}-failed",
        "exit_code": int(Exit.FAILED),
    }


def _crashed(ending: Ending, crashes: int) -> dict[str, Any]:
    if (ending.error or {}).get("code") == KILLED_FOR_MEMORY:
        return dict(ending.error or {})
    return {
        "what": f"The {ending.process} died {counted(crashes, 'time')} without a new checkpoint.",
        "numbers": [f"the last time: {account(None, ending)}", *ending.log],
        "hint": "see the job's log",
        "code": "crashed",
        "exit_code": int(Exit.FAILED),
    }

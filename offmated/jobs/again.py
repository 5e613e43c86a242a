"""Decides when a job is tried again by the clock, where nobody can see whether the thing that it waits for is there.
The pauses double, up to a limit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

FIRST_S, LONGEST_S = 60.0, 900.0


def trying_again(error: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `error`, with which the job's last process ended, that also says when the job is tried again. `before`
    is the error of the process before: if it has the same code, the pause is twice its pause, at most `LONGEST_S`
    seconds; else `FIRST_S`."""
    _, last_s = _tried(before) if before is not None and before.get("code") == error.get("code") else (0.0, 0.0)
    pause_s = min(2 * last_s, LONGEST_S) if last_s else FIRST_S
    return {**error, "again": {"at": time.time() + pause_s, "pause_s": pause_s}}


def is_time(error: Mapping[str, Any] | None) -> bool:
    """Whether the time has come to try the job that ended with `error` again. True also if the clock was set back to
    before the pause, and if `error` does not say when."""
    at, pause_s = _tried(error)
    return not time.time() < at <= time.time() + pause_s


def tried_at(error: Mapping[str, Any] | None) -> str:
    """The local time, as "HH:MM", at which the job that ended with `error` is tried again."""
    at, _ = _tried(error)
    return time.strftime("%H:%M", time.localtime(max(at, time.time()) + 59))


def _tried(error: Mapping[str, Any] | None) -> tuple[float, float]:
    """When the job is tried again, and how long the pause before it is; 0 and 0 where `error` does not say."""
    again = (error or {}).get("again")
    at, pause_s = (again.get("at"), again.get("pause_s")) if isinstance(again, dict) else (None, None)
    return (at, pause_s) if isinstance(at, float) and isinstance(pause_s, float) else (0.0, 0.0)

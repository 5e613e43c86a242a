"""When a job is tried again by the clock, where nobody can see that what it waits for is there: sooner at first, later
and later then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

FIRST_S, LONGEST_S = 60.0, 900.0


def trying_again(error: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """`error`, that of a job's last process, with when the job is tried again: after twice the pause that `before` has,
    what its process before that ended with, where that was the same."""
    _, last_s = _tried(before) if before is not None and before.get("code") == error.get("code") else (0.0, 0.0)
    pause_s = min(2 * last_s, LONGEST_S) if last_s else FIRST_S
    return {**error, "again": {"at": time.time() + pause_s, "pause_s": pause_s}}


def is_time(error: Mapping[str, Any] | None) -> bool:
    """Whether it is time to try again; also where the clock was set back behind the pause, and where `error` does not
    say when."""
    at, pause_s = _tried(error)
    return not time.time() < at <= time.time() + pause_s


def tried_at(error: Mapping[str, Any] | None) -> str:
    """When it is tried again, by the clock on the wall."""
    at, _ = _tried(error)
    return time.strftime("%H:%M", time.localtime(max(at, time.time()) + 59))


def _tried(error: Mapping[str, Any] | None) -> tuple[float, float]:
    """When it is tried again, and how long the pause before is; 0 and 0 where `error` does not say."""
    found = (error or {}).get("again")
    at, pause_s = (found.get("at"), found.get("pause_s")) if isinstance(found, dict) else (None, None)
    return (at, pause_s) if isinstance(at, float) and isinstance(pause_s, float) else (0.0, 0.0)

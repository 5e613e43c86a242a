"""Jobs that wait for the Hugging Face hub: when they ask it again, sooner at first, later and later then."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from offmated.jobs.states import Hold
from offmated.jobs.table import JobRow
from planner.hub import NOT_REACHED

FIRST_S, LONGEST_S = 60.0, 900.0


def asking_again(error: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The error of a hub that is not reached, with when it is asked again: after twice the pause that `before` has,
    what the job's last process ended with, where that was the same."""
    _, last_s = _asked(before)
    pause_s = min(2 * last_s, LONGEST_S) if last_s else FIRST_S
    return {**error, "again": {"at": time.time() + pause_s, "pause_s": pause_s}}


def waits_for_hub(error: Mapping[str, Any] | None) -> bool:
    """Whether that is what a job ended with last: it has not got past the hub since, as far as is known."""
    return error is not None and error["code"] == NOT_REACHED


def asks_now(error: Mapping[str, Any] | None) -> bool:
    """Whether it is time; also where the clock was set back behind the pause, and nobody knows the time."""
    at, pause_s = _asked(error)
    return not time.time() < at <= time.time() + pause_s


def asked_at(error: Mapping[str, Any] | None) -> str:
    """When the hub is asked again, by the clock on the wall."""
    at, _ = _asked(error)
    return time.strftime("%H:%M", time.localtime(max(at, time.time()) + 59))


def waiting_line(row: JobRow) -> str | None:
    """What the log of a job says that has just begun to wait for the hub; None of all others."""
    error = row.error
    if row.hold is not Hold.NO_HUB or error is None:
        return None
    return f"waits for the hub, tried again at {asked_at(error)}: {' '.join((error['what'], *error['numbers']))}"


def _asked(error: Mapping[str, Any] | None) -> tuple[float, float]:
    """When it is asked again, and how long the pause before is; 0 and 0 where `error` does not say."""
    found = error.get("again") if waits_for_hub(error) and error is not None else None
    at, pause_s = (found.get("at"), found.get("pause_s")) if isinstance(found, dict) else (None, None)
    return (at, pause_s) if isinstance(at, float) and isinstance(pause_s, float) else (0.0, 0.0)

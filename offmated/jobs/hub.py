"""Recognizes jobs that wait because the Hugging Face hub could not be reached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offmated.jobs.again import tried_at
from offmated.jobs.states import Hold
from offmated.jobs.table import JobRow
from planner.hub import NOT_REACHED


def waits_for_hub(error: Mapping[str, Any] | None) -> bool:
    """Whether a job waits for the Hugging Face hub, because `error`, with which its last process ended, says that the
    hub was not reached."""
    return error is not None and error["code"] == NOT_REACHED


def waiting_line(row: JobRow) -> str | None:
    """The line for the log about a job that has just begun to wait for the hub; None for all other jobs."""
    error = row.error
    if row.hold is not Hold.NO_HUB or error is None:
        return None
    return f"waits for the hub, tried again at {tried_at(error)}: {' '.join((error['what'], *error['numbers']))}"

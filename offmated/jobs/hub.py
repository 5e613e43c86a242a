"""Recognizes jobs that wait for the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offmated.jobs.again import tried_at
from offmated.jobs.states import Hold
from offmated.jobs.table import JobRow
from planner.hub import NOT_REACHED


def waits_for_hub(error: Mapping[str, Any] | None) -> bool:
    """Whether a job's last process ended because the hub was not reached: as far as is known, it still is not."""
    return error is not None and error["code"] == NOT_REACHED


def waiting_line(row: JobRow) -> str | None:
    """The log line for a job that has just begun to wait for the hub; None for all other jobs."""
    error = row.error
    if row.hold is not Hold.NO_HUB or error is None:
        return None
    return f"waits for the hub, tried again at {tried_at(error)}: {' '.join((error['what'], *error['numbers']))}"

"""Decides, by place and size, whether a job's data are read when the job is submitted or only when it starts."""

from __future__ import annotations

from pathlib import Path

from planner.data.local_data import is_local, local_data
from planner.job.schema import Job
from planner.units import format_bytes

MOST_BYTES = 64 * 2**20
"""The most bytes of all files together: tokenizing them takes a minute at most."""


def why_not_at_hand(job: Job) -> str | None:
    """Return the reason why a job's data are read only when it starts; None where they are read at submission."""
    size = 0
    for entry in (*job.data, *job.eval_data):
        if not is_local(entry.path):
            return f"{entry.path} is on the hub"
        try:
            size += sum(file.stat().st_size for file in local_data(Path(entry.path)).files)
        except (OSError, ValueError) as error:
            return str(error)
    if size > MOST_BYTES:
        return f"the data have {format_bytes(size)}, more than {format_bytes(MOST_BYTES)}"
    return None

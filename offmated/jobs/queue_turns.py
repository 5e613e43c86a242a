"""Decides when a job may start: the wishes of its submission, the order of the queue, and the conditions that keep a
job waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.orm import aliased

from offmated.jobs.states import JobState
from offmated.jobs.table import JobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The conditions, given at its submission, under which a job may start; the fields are as the columns of `JobRow`.
    `begin_at`: seconds since 1970. `window`: the hours in which the job may have
    the GPU, in place of those that the job file or the machine gives."""

    priority: int = 0
    after: int | None = None
    begin_at: float | None = None
    label: str | None = None
    held: bool = False
    window: str | None = None


AT_ONCE = Turn()
"""The turn of a submission that asks for nothing."""


def queue_order() -> tuple[ColumnElement[Any], ...]:
    """The SQL columns by which jobs are sorted in the order in which they start."""
    return JobRow.priority.desc(), JobRow.position.asc(), JobRow.id.asc()


def has_turn(phase: JobState) -> ColumnElement[bool]:
    """The SQL condition that nothing keeps a job, in the state before `phase`, from starting this phase now. Plans are
    made as soon as they can be, as they depend neither on times nor on other jobs."""
    if phase is JobState.PLANNING:
        return JobRow.hold.is_(None)
    other = aliased(JobRow)
    unfinished = select(other.id).where(other.id == JobRow.after_id, other.state != JobState.DONE).exists()
    return and_(
        JobRow.hold.is_(None),
        or_(JobRow.begin_at.is_(None), JobRow.begin_at <= time.time()),
        or_(JobRow.after_id.is_(None), ~unfinished),
    )

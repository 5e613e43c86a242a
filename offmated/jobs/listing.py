"""Where jobs stand in the queue, and lists of them page by page. Each function is a few queries, however many jobs
there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Subquery, func, select
from sqlalchemy.orm import Session

from offmated.jobs.states import FINAL, TAKEN_FROM, JobState
from offmated.jobs.store import Store, no_such_job
from offmated.jobs.table import JobRow, queue_order

_ACTIVE = tuple(state for state in JobState if state not in FINAL)
_PHASE = {state: phase for phase, due in TAKEN_FROM.items() for state in (phase, due)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A job and where it stands.

    `place` is among the jobs that are not over, from 1, what is worked on before what waits; None when it is over.
    `ahead` counts the jobs due for the same worker before it, `busy` are the numbers of those the worker works on.
    """

    row: JobRow
    place: int | None = None
    ahead: int = 0
    busy: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs of a list of `total`; `following` is where the next page begins, None when this is the last."""

    jobs: tuple[Listed, ...]
    following: int | None
    total: int


def one(store: Store, job_id: int) -> Listed:
    """One job. Raises UserError `no-such-job` (exit 4)."""
    with store.looking() as session:
        row = session.get(JobRow, job_id)
        if row is None:
            raise no_such_job(job_id)
        return _listed(session, [row])[0]


def newest(store: Store, states: Sequence[JobState] = (), *, before: int | None = None, limit: int) -> Page:
    """Jobs in these states (none given: all) with numbers below `before`, the newest first."""
    wanted = JobRow.state.in_(states or tuple(JobState))
    query = select(JobRow).where(wanted).order_by(JobRow.id.desc()).limit(limit + 1)
    with store.looking() as session:
        total = _count(session, wanted)
        rows = session.scalars(query if before is None else query.where(JobRow.id < before)).all()
        jobs = _listed(session, rows[:limit])
    return Page(jobs=jobs, following=jobs[-1].row.id if len(rows) > limit else None, total=total)


def queue(store: Store, *, place: int = 1, limit: int) -> Page:
    """Jobs that are not over from this place on, in the order of their places."""
    places = _places()
    following = place + limit
    with store.looking() as session:
        total = _count(session, JobRow.state.in_(_ACTIVE))
        wanted = select(places.c.id).where(places.c.place.between(place, following - 1))
        rows = session.scalars(select(JobRow).where(JobRow.id.in_(wanted))).all()
        jobs = _listed(session, rows)
    return Page(
        jobs=tuple(sorted(jobs, key=lambda job: job.place or 0)),
        following=following if following <= total else None, total=total,
    )  # fmt: skip


def working(store: Store) -> tuple[Listed, ...]:
    """The jobs that somebody works on now."""
    with store.looking() as session:
        rows = session.scalars(select(JobRow).where(JobRow.state.in_(tuple(TAKEN_FROM))).order_by(JobRow.id)).all()
        return _listed(session, rows)


def count_by_state(store: Store) -> dict[JobState, int]:
    """How many jobs there are in each state; states without any are left out."""
    with store.looking() as session:
        counts = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state))
        return {state: int(number) for state, number in counts}


def _places() -> Subquery:
    """Of each job that is not over its place, and its number among those in its state. The database counts them by an
    index: nobody reads their rows."""
    order = queue_order()
    return (
        select(
            JobRow.id,
            func.row_number().over(order_by=(JobRow.state.in_(tuple(TAKEN_FROM)).desc(), *order)).label("place"),
            func.row_number().over(partition_by=JobRow.state, order_by=order).label("number"),
        )
        .where(JobRow.state.in_(_ACTIVE))
        .subquery()
    )


def _listed(session: Session, rows: Sequence[JobRow]) -> tuple[Listed, ...]:
    """Where the jobs stand. Asked for by their numbers: SQLite joins what it has counted row by row."""
    places = _places()
    wanted = select(places).where(places.c.id.in_([row.id for row in rows]))
    found = {number: (place, among - 1) for number, place, among in session.execute(wanted)}
    taken = session.execute(select(JobRow.state, JobRow.id).where(JobRow.state.in_(tuple(TAKEN_FROM)))).all()
    busy = {phase: tuple(number for state, number in taken if state is phase) for phase in TAKEN_FROM}
    listed = []
    for row in rows:
        place, ahead = found.get(row.id, (None, 0))
        working = busy[_PHASE[row.state]] if row.state in _PHASE else ()
        listed.append(Listed(row=row, place=place, ahead=ahead, busy=working))
    return tuple(listed)


def _count(session: Session, wanted: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(JobRow).where(wanted)) or 0

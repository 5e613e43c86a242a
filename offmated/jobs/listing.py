"""Finds where jobs stand in the queue, and lists them page by page. Each function makes a few queries, however many
jobs there are."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import ColumnElement, Subquery, and_, case, func, or_, select, true
from sqlalchemy.orm import Session

from offmated.jobs.figures import DAMAGED, left_s, stop_s
from offmated.jobs.hub import waits_for_hub
from offmated.jobs.queue_changes import wishes
from offmated.jobs.queue_forecast import UNKNOWN, Expected, Work, forecast
from offmated.jobs.queue_turns import has_turn, queue_order
from offmated.jobs.states import FINAL, TAKEN_FROM, JobState
from offmated.jobs.store import Store, no_such_job
from offmated.jobs.table import JobRow
from planner.keys.window import Window
from planner.run.folder import RunFolder

FORESEEN = 50  # ends are forecast for so many jobs of the queue, since each has files to be looked at
_ACTIVE = tuple(state for state in JobState if state not in FINAL)
_PHASE = {state: phase for phase, due in TAKEN_FROM.items() for state in (phase, due)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A job's row, and where the job stands in the queue.

    `place` is its place among the jobs that are not over, from 1, jobs that are worked on before jobs that wait; None
    when it is over. `ahead` counts the jobs before it that are due for the same worker; `busy` has the numbers of the
    jobs that this worker works on. `after` is the state of the job whose end it waits for, None where it need not wait.
    `paused`: the whole machine is paused. `yields`: no job uses the GPU, because another program does. `expected`: the
    forecast of its begin and end, known for the first jobs of the queue only."""

    row: JobRow
    place: int | None = None
    ahead: int = 0
    busy: tuple[int, ...] = ()
    after: JobState | None = None
    paused: bool = False
    yields: bool = False
    expected: Expected = UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some jobs of a list that has `total` jobs. `following`: where the next page begins; None when this is the last
    page. `paused`: in a list of the queue, whether the whole machine is paused."""

    jobs: tuple[Listed, ...]
    following: int | None
    total: int
    paused: bool = False


def one(store: Store, job_id: int) -> Listed:
    """The job `job_id` and where it stands in the queue. Raises UserError `no-such-job` (exit 4)."""
    with store.looking() as session:
        row = session.get(JobRow, job_id)
        if row is None:
            raise no_such_job(job_id)
        return _listed(session, [row])[0]


def newest(
    store: Store,
    states: Sequence[JobState] = (),
    *,
    before: int | None = None,
    label: str | None = None,
    limit: int,
    by_end: bool = False,
) -> Page:
    """The newest `limit` jobs that are in one of `states` (none given: any), have this label and a number below
    `before`, newest first. With `by_end` they are those that ended last, the last first, and no page follows."""
    wanted = and_(JobRow.state.in_(states or tuple(JobState)), _labelled(label))
    order = (JobRow.ended_at.desc(), JobRow.id.desc()) if by_end else (JobRow.id.desc(),)
    query = select(JobRow).where(wanted).order_by(*order).limit(limit + 1)
    with store.looking() as session:
        total = _count(session, wanted)
        rows = session.scalars(query if before is None else query.where(JobRow.id < before)).all()
        jobs = _listed(session, rows[:limit])
    more = len(rows) > limit and not by_end
    return Page(jobs=jobs, following=jobs[-1].row.id if more else None, total=total)


def queue(store: Store, *, place: int = 1, label: str | None = None, limit: int) -> Page:
    """At most `limit` jobs with this label that are not over, in the order of the queue, from number `place` in it
    on."""
    places = _places()
    with store.looking() as session:
        total = _count(session, and_(JobRow.state.in_(_ACTIVE), _labelled(label)))
        query = select(places.c.id).join(JobRow, JobRow.id == places.c.id).where(places.c.place >= place)
        wanted = query.where(_labelled(label)).order_by(places.c.place).limit(limit + 1)
        rows = session.scalars(select(JobRow).where(JobRow.id.in_(wanted))).all()
        jobs = sorted(_listed(session, rows), key=lambda job: job.place or 0)
        paused = jobs[0].paused if jobs else wishes(session)[0]
    following = jobs[limit].place if len(jobs) > limit else None
    return Page(jobs=tuple(jobs[:limit]), following=following, total=total, paused=paused)


def _labelled(label: str | None) -> ColumnElement[bool]:
    return JobRow.label == label if label is not None else true()


def working(store: Store) -> tuple[Listed, ...]:
    """The jobs on which a worker works now."""
    with store.looking() as session:
        rows = session.scalars(select(JobRow).where(JobRow.state.in_(tuple(TAKEN_FROM))).order_by(JobRow.id)).all()
        return _listed(session, rows)


def ended_since(
    store: Store, since: float, limit: int = FORESEEN, *, states: Iterable[JobState] = FINAL, newest: bool = False
) -> tuple[Listed, ...]:
    """The first `limit` jobs in one of these states that ended after the time `since` (seconds since 1970), or with
    `newest` the last ones. They come in the order in which they ended."""
    ended = select(JobRow).where(JobRow.state.in_(tuple(states)), JobRow.ended_at > since)
    order = JobRow.ended_at.desc() if newest else JobRow.ended_at
    with store.looking() as session:
        rows = session.scalars(ended.order_by(order).limit(limit)).all()
        return _listed(session, rows[::-1] if newest else rows)


def count_by_state(store: Store, *, ended_since: float | None = None) -> dict[JobState, int]:
    """State -> the number of jobs that are in it; with `ended_since` (seconds since 1970), of those that ended after
    it. States without jobs are left out."""
    wanted = true() if ended_since is None else and_(JobRow.state.in_(tuple(FINAL)), JobRow.ended_at > ended_since)
    with store.looking() as session:
        counts = session.execute(select(JobRow.state, func.count()).where(wanted).group_by(JobRow.state))
        return {state: int(number) for state, number in counts}


def _places() -> Subquery:
    """For each job that is not over: its place, and its number among the jobs in its state that have a turn, or among
    those that have none. The database counts by an index, without reading the rows."""
    order = queue_order()
    due = case(*((JobRow.state == before, has_turn(phase)) for phase, before in TAKEN_FROM.items()), else_=true())
    return (
        select(
            JobRow.id,
            func.row_number().over(order_by=(JobRow.state.in_(tuple(TAKEN_FROM)).desc(), *order)).label("place"),
            func.row_number().over(partition_by=(JobRow.state, due), order_by=order).label("number"),
        )
        .where(JobRow.state.in_(_ACTIVE))
        .subquery()
    )


def _listed(session: Session, rows: Sequence[JobRow]) -> tuple[Listed, ...]:
    """Where the jobs stand. Their places are asked for by job number and not by a join, as SQLite would join the
    counted places row by row."""
    places = _places()
    wanted = select(places).where(places.c.id.in_([row.id for row in rows]))
    place_of = {number: (place, among - 1) for number, place, among in session.execute(wanted)}
    taken = session.execute(select(JobRow.state, JobRow.id).where(JobRow.state.in_(tuple(TAKEN_FROM)))).all()
    busy = {phase: tuple(number for state, number in taken if state is phase) for phase in TAKEN_FROM}
    paused, yields = wishes(session)
    named = [row.after_id for row in rows if row.after_id is not None and row.state not in FINAL]
    others = session.execute(select(JobRow.id, JobRow.state).where(JobRow.id.in_(named)))
    after = {other.id: other.state for other in others}
    expected = _expected(session, paused or yields) if any(row.state not in FINAL for row in rows) else {}
    listed = []
    for row in rows:
        place, ahead = place_of.get(row.id, (None, 0))
        working = busy[_PHASE[row.state]] if row.state in _PHASE else ()
        before = after.get(row.after_id) if row.after_id is not None else None
        listed.append(
            Listed(
                row=row,
                place=place,
                ahead=ahead,
                busy=working,
                paused=paused,
                yields=yields,
                after=None if before is JobState.DONE else before,
                expected=expected.get(row.id, UNKNOWN),
            )
        )
    return tuple(listed)


def _expected(session: Session, paused: bool) -> dict[int, Expected]:
    """When the first jobs of the queue begin and end, as it looks now."""
    if paused:
        return {}
    first = select(JobRow.id).where(JobRow.state.in_(_ACTIVE)).order_by(*queue_order()).limit(FORESEEN)
    taken = select(JobRow.id).where(JobRow.state.in_(tuple(TAKEN_FROM)))
    rows = session.scalars(
        select(JobRow).where(or_(JobRow.id.in_(first), JobRow.id.in_(taken))).order_by(*queue_order())
    ).all()
    others = {row.after_id for row in rows if row.after_id is not None}
    ended = select(JobRow.id).where(JobRow.id.in_(others), JobRow.state == JobState.DONE)
    done = set(session.scalars(ended)) if others else set()
    here = {row.id for row in rows}
    works = []
    for row in rows:
        run = RunFolder(Path(row.run_dir))
        after = row.after_id if row.after_id not in done else None
        needed_s, stop, window, known = None, 0.0, None, False
        with suppress(*DAMAGED):  # nothing is forecast from a damaged folder
            needed_s, stop = left_s(run), stop_s(run)
        with suppress(ValueError):  # a time zone that this machine does not know any more
            window, known = Window.parse(row.window) if row.window is not None else None, True
        works.append(
            Work(
                id=row.id,
                left_s=needed_s,
                stop_s=stop,
                begin_at=row.begin_at or 0.0,
                window=window,
                after=after,
                blocked=not known
                or row.hold is not None
                or (after is not None and after not in here)
                or (row.state is not JobState.RUNNING and waits_for_hub(row.error)),
                running=row.state is JobState.RUNNING and row.stop_reason is None,
            )
        )
    return forecast(works, time.time())


def _count(session: Session, wanted: ColumnElement[bool]) -> int:
    return session.scalar(select(func.count()).select_from(JobRow).where(wanted)) or 0

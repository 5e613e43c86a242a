"""Changes the queue as users ask: hold and release, pause and resume, move. Nothing here changes a job's state: only
`Store._write` does, once the process that works on the job has ended."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from offmated.jobs.again import is_time
from offmated.jobs.figures import DAMAGED, stop_s
from offmated.jobs.queue_turns import queue_order
from offmated.jobs.room import goes_on
from offmated.jobs.states import AGAIN, FINAL, PASSING, TAKEN_FROM, Hold, JobState
from offmated.jobs.store import Store, no_such_job
from offmated.jobs.table import JobRow, WishRow
from planner.errors import Exit, UserError
from planner.keys.window import Window
from planner.run.folder import RunFolder

_PAUSE, _YIELD = "pause", "yield"
_IDLE = tuple(TAKEN_FROM.values())
_PASSING = tuple(PASSING.values())
_BY_NOBODY = (None, *_PASSING)


def hold(store: Store, job_id: int) -> None:
    """Keep a waiting job from starting until it is released. Raises UserError `job-ended`, `job-begun`."""
    with store.writing() as session:
        row = _living(session, job_id)
        if row.state in TAKEN_FROM:
            raise _begun(row, f"offmate pause {job_id} has it save a checkpoint and wait")
        if row.hold in _BY_NOBODY:
            _set(session, row, hold=Hold.HELD)


def release(store: Store, job_id: int) -> None:
    """Remove everything but the queue's order that keeps a job from starting: a hold, a start time, a window of hours,
    another job to wait for. Raises UserError `job-ended`, and `not-held` where it waits for none of these already."""
    with store.writing() as session:
        row = _living(session, job_id)
        if (row.hold, row.begin_at, row.after_id, row.window) == (None, None, None, None):
            raise UserError(
                f"Job {job_id} is not held: it waits for nothing but its turn.",
                code="not-held",
                exit_code=Exit.USAGE,
                hint=f"offmate move {job_id} --first",
            )
        _set(session, row, hold=None, begin_at=None, after_id=None, window=None)


def pause(store: Store, job_id: int) -> None:
    """Make a job save a checkpoint, leave the GPU and wait until it is resumed. A waiting job does not start until
    then. Raises UserError `job-ended`."""
    with store.writing() as session:
        row = _living(session, job_id)
        if row.hold in _BY_NOBODY:  # the dispatcher has its process end
            _set(session, row, hold=Hold.PAUSED)


def resume(store: Store, job_id: int) -> None:
    """Undo a pause or a hold of a job. Raises UserError `job-ended`, and `not-paused` where there is neither."""
    with store.writing() as session:
        row = _living(session, job_id)
        if row.hold is None:
            raise UserError(
                f"Job {job_id} is not paused.", code="not-paused", exit_code=Exit.USAGE, hint=f"offmate show {job_id}"
            )
        _set(session, row, hold=None)


def go_on(store: Store) -> list[int]:
    """Let those jobs start again whose disks now have the space they need, and those that are due to be tried again by
    the clock. Returns their numbers."""
    with store.looking() as session:
        held = session.scalars(select(JobRow).where(JobRow.hold.in_(_PASSING), JobRow.state.in_(_IDLE))).all()
    numbers = []
    for row in held:
        with suppress(OSError):  # a disk that does not answer has no room
            if not (goes_on(row.error) if row.hold is Hold.NO_ROOM else is_time(row.error)):
                continue
            with store.writing() as session:
                mine = JobRow.id == row.id, JobRow.hold == row.hold
                session.execute(update(JobRow).where(*mine).values(hold=None))
            numbers.append(row.id)
    return numbers


def until_next_window(store: Store, row: JobRow) -> None:
    """Make a job start, or continue, only when its window (the hours in which it may have the GPU) opens next."""
    assert row.window is not None
    with store.writing() as session:
        mine = JobRow.id == row.id, JobRow.window == row.window  # it may have been released meanwhile
        opens = Window.parse(row.window).next_opening(time.time())
        session.execute(update(JobRow).where(*mine).values(begin_at=opens))


def is_too_late(row: JobRow) -> bool:
    """Whether a job's window (the hours in which it may have the GPU) is closed, or the rest of it is too short for a
    step and a save. For a job whose folder is damaged the window alone counts: its worker finds the damage. Raises
    ValueError for a window that is not valid on this machine."""
    if row.window is None:
        return False
    now, span = time.time(), Window.parse(row.window).span(time.time())
    needed_s = 0.0
    with suppress(*DAMAGED):
        needed_s = stop_s(RunFolder(Path(row.run_dir)))
    return now < span.opens or now >= span.closes - needed_s


def too_short(row: JobRow) -> tuple[float, float] | None:
    """(seconds of the job's window, seconds that a step and a save take), for a job whose window (the hours in which it
    may have the GPU) is shorter than these. None for all other jobs, and where it is not known."""
    if row.window is None:
        return None
    with suppress(*DAMAGED):
        span, needed_s = Window.parse(row.window).span(time.time()), stop_s(RunFolder(Path(row.run_dir)))
        if needed_s >= span.closes - span.opens:
            return span.closes - span.opens, needed_s
    return None


def pause_all(store: Store) -> None:
    """Pause the whole machine: no job works until `resume_all`. Running jobs save a checkpoint first."""
    with store.writing() as session:
        if paused_since(session) is None:
            session.merge(WishRow(name=_PAUSE, since=time.time()))


def resume_all(store: Store) -> None:
    """Undo `pause_all`: let jobs work again."""
    with store.writing() as session:
        if (wish := session.get(WishRow, _PAUSE)) is not None:
            session.delete(wish)


def leave_gpu(store: Store, leave: bool) -> None:
    """With `leave`, keep all jobs off the GPU because another program uses it; without, let them use it again."""
    with store.writing() as session:
        wish = session.get(WishRow, _YIELD)
        if leave and wish is None:
            session.add(WishRow(name=_YIELD, since=time.time()))
        elif not leave and wish is not None:
            session.delete(wish)


def yields(store: Store) -> bool:
    """Whether all jobs are to stay off the GPU because another program uses it."""
    with store.looking() as session:
        return wishes(session)[1]


def wishes(session: Session) -> tuple[bool, bool]:
    """(whether the whole machine is paused, whether all jobs are to stay off the GPU because another program uses
    it)."""
    names = set(session.scalars(select(WishRow.name).where(WishRow.name.in_((_PAUSE, _YIELD)))))
    return _PAUSE in names, _YIELD in names


def paused_since(session: Session) -> float | None:
    """The time, in seconds since 1970, since when the whole machine is paused; None while it is not."""
    return session.scalar(select(WishRow.since).where(WishRow.name == _PAUSE))


def is_paused(store: Store) -> bool:
    """Whether the whole machine is paused, so that no job works."""
    with store.looking() as session:
        return paused_since(session) is not None


def move_before(store: Store, job_id: int, other_id: int) -> None:
    """Give a waiting job the place in the queue before another waiting job, and that job's priority. Raises UserError
    `job-ended`, `job-begun`."""
    with store.writing() as session:
        row, other = _waiting(session, job_id), _waiting(session, other_id)
        if row.id != other.id:
            _put_before(session, row, other)


def move_first(store: Store, job_id: int) -> None:
    """Give a waiting job the first place among the waiting jobs. Raises UserError `job-ended`, `job-begun`."""
    with store.writing() as session:
        row = _waiting(session, job_id)
        first = session.scalars(_in_order().limit(1)).first()
        if first is not None and row.id != first.id:
            _put_before(session, row, first)


def move_last(store: Store, job_id: int) -> None:
    """Give a waiting job the last place among the waiting jobs. Raises UserError `job-ended`, `job-begun`."""
    with store.writing() as session:
        row = _waiting(session, job_id)
        waiting = session.scalars(select(JobRow.priority).where(JobRow.state.in_(_IDLE)).order_by(JobRow.priority))
        last = session.scalars(select(JobRow.position).order_by(JobRow.position.desc()).limit(1)).one()
        _set(session, row, priority=min([*waiting, row.priority]), position=last + 1)


def set_priority(store: Store, job_id: int, priority: int) -> None:
    """Set a waiting job's priority: it comes before all jobs of a lower priority. Raises UserError `job-ended`,
    `job-begun`."""
    with store.writing() as session:
        _set(session, _waiting(session, job_id), priority=priority)


def _in_order() -> Any:
    return select(JobRow).where(JobRow.state.in_(_IDLE)).order_by(*queue_order())


def _put_before(session: Session, row: JobRow, other: JobRow) -> None:
    """Put `row` at the position of `other`, and move all jobs from there on back by one. Jobs of other priorities may
    move, too: positions of different priorities are never compared."""
    place = other.position
    room = update(JobRow).where(JobRow.position >= place).values(position=JobRow.position + 1)
    session.execute(room.execution_options(synchronize_session=False))
    _set(session, row, priority=other.priority, position=place)


def _living(session: Session, job_id: int) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise no_such_job(job_id)
    if row.state in FINAL:
        verb = "retry" if row.state in AGAIN else "show"
        raise UserError(
            f"Job {job_id} is over: {row.state}.",
            hint=f"offmate {verb} {job_id}",
            code="job-ended",
            exit_code=Exit.USAGE,
        )
    return row


def _waiting(session: Session, job_id: int) -> JobRow:
    """The job, if it waits or will wait once it is planned. Raises UserError `job-ended`, `job-begun`."""
    row = _living(session, job_id)
    if row.state is JobState.RUNNING:
        raise _begun(row, "its place matters again when it waits")
    return row


def _begun(row: JobRow, hint: str) -> UserError:
    return UserError(
        f"Job {row.id} does not wait: it is {row.state}.", code="job-begun", hint=hint, exit_code=Exit.USAGE
    )


def _set(session: Session, row: JobRow, **values: Any) -> None:
    change = update(JobRow).where(JobRow.id == row.id).values(**values)
    session.execute(change.execution_options(synchronize_session=False))

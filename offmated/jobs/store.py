"""Stores jobs in the database, the only source of truth about them. `Store._write` is the only function that changes a
job's state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from offmated.config import Config
from offmated.jobs.again import trying_again
from offmated.jobs.database import PATIENCE_S, WORKERS_PATIENCE_S, open_engine, reading
from offmated.jobs.queue_turns import AT_ONCE, Turn, has_turn, queue_order
from offmated.jobs.room import needing
from offmated.jobs.states import AGAIN, FINAL, NEXT, TAKEN_FROM, Ending, Hold, JobState, StopReason, account, judge
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.errors import Exit, UserError, first_line
from planner.run.folder import RunFolder
from planner.run.processes import Process

log = logging.getLogger(__name__)

LOG_LINES = 12
_CLOSED = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
PROCESSES = {JobState.PLANNING: "planner", JobState.RUNNING: "trainer"}


class KeyTaken(Exception):
    """Raised where a job with the same submission key exists already."""


class Store:
    """The jobs in one database. Each method is one transaction; the rows that it returns are detached copies."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long a write waits for a busy database."""
        self.url = url
        self.engine = open_engine(url, patience_s=patience_s)
        self._reading = reading(self.engine)
        self._patience_s = patience_s
        self._turn = threading.Lock()

    @classmethod
    def from_environment(cls) -> Store:
        """The store that this user's daemon uses, for its worker processes."""
        return cls(Config.load(Paths.from_environment()).database_url, patience_s=WORKERS_PATIENCE_S)

    def add(
        self,
        name: str,
        prepare: Callable[[int], Path],
        turn: Turn = AT_ONCE,
        *,
        key: str | None = None,
        notes: Sequence[str] = (),
        output_dir: str | None = None,
        fingerprint: str | None = None,
        again: int | None = None,
    ) -> JobRow:
        """Add a new job and return its row. `prepare` gets its number and makes its run folder; when it raises, no row
        is left. `key`, `notes` (as they are after `prepare`), `output_dir` and `fingerprint` are as in `JobRow`. If a
        job other than `again` has the same fingerprint, one more note says so. Raises UserError `output-taken`,
        `no-such-job` where `turn.after` names no job, and `KeyTaken` when there is a job with this `key`."""
        with self.writing() as session:
            _check_free(session, output_dir)
            if turn.after is not None and session.get(JobRow, turn.after) is None:
                raise no_such_job(turn.after)
            last = session.scalar(select(func.max(JobRow.position))) or 0
            row = JobRow(
                name=name,
                state=JobState.SUBMITTED,
                priority=turn.priority,
                run_dir="",
                created_at=time.time(),
                attempts=0,
                history=[],
                crashes=0,
                submission_key=key,
                notes=[],
                output_dir=output_dir,
                position=last + 1,
                label=turn.label,
                hold=Hold.HELD if turn.held else None,
                after_id=turn.after,
                begin_at=turn.begin_at,
                window=turn.window,
                fingerprint=fingerprint,
            )
            session.add(row)
            try:
                session.flush()
            except IntegrityError as error:
                raise KeyTaken from error
            row.run_dir = str(prepare(row.id))
            row.notes = [*notes, *_same_work(session, row, again)]
        return row

    def submitted(self, key: str) -> JobRow | None:
        """The job that was submitted under the key `key`; None if there is none."""
        with self.looking() as session:
            return session.scalars(select(JobRow).where(JobRow.submission_key == key)).first()

    def check_free(self, output_dir: str) -> None:
        """Raise UserError `output-taken` when a job that is not over writes its model to the folder `output_dir`."""
        with self.looking() as session:
            _check_free(session, output_dir)

    def job(self, job_id: int) -> JobRow:
        """The row of job number `job_id`. Raises UserError `no-such-job` (exit 4)."""
        with self.looking() as session:
            row = session.get(JobRow, job_id)
        if row is None:
            raise no_such_job(job_id)
        return row

    def jobs(self, *states: JobState) -> Sequence[JobRow]:
        """The rows of the jobs in these states (none given: all), in the order of their numbers."""
        query = select(JobRow).order_by(JobRow.id)
        if states:
            query = query.where(JobRow.state.in_(states))
        with self.looking() as session:
            return session.scalars(query).all()

    def living(self) -> frozenset[JobState]:
        """The states of all jobs that are not over, each once. It is one quick query, as the daemon makes it twice a
        second."""
        query = select(JobRow.state).where(JobRow.state.not_in(FINAL)).distinct()
        with self.looking() as session:
            return frozenset(session.scalars(query))

    def due(self, phase: JobState, at_most: int) -> Sequence[JobRow]:
        """At most `at_most` jobs that may start `phase` (PLANNING or RUNNING) now, in the order of the queue."""
        # The numbers are found by an index alone; then only these rows are read.
        first = select(JobRow.id).where(JobRow.state == TAKEN_FROM[phase], has_turn(phase)).order_by(*queue_order())
        query = select(JobRow).where(JobRow.id.in_(first.limit(at_most))).order_by(*queue_order())
        with self.looking() as session:
            return session.scalars(query).all()

    def take(self, job_id: int, phase: JobState, owner: Process) -> JobRow | None:
        """Begin `phase` (PLANNING or RUNNING) of a job for the process `owner`, and return the job's row. None when the
        job may not start this phase now, for example because another process was faster. A job whose row is damaged
        fails: else it would be handed out again and again."""
        row = self.job(job_id)
        if row.state is not TAKEN_FROM[phase]:
            return None
        begun: dict[str, Any] = {"owner": str(owner), "stop_reason": None, "exit_code": None}
        try:
            begun |= _begun(row) if phase is JobState.RUNNING else {}
        except (TypeError, ValueError) as error:
            log.exception("job %d cannot be begun", job_id)
            self.give_up(row, error)
            return None
        if not self._write(job_id, TAKEN_FROM[phase], phase, row, begun, has_turn(phase)):
            return None
        return self.job(job_id)

    def end(
        self,
        row: JobRow,
        exit_code: int | None,
        *,
        process: str = "",
        blameless: bool = False,
        less: bool = False,
        energy_j: float | None = None,
    ) -> JobState | None:
        """Record that the process that worked on `row`, as `take` returned it, has ended. Returns the job's new state;
        None when the job no longer belongs to `row.owner`.

        `exit_code`, `process` (by default the phase's own), `blameless` and `less` are those of `Ending`. `energy_j`:
        the joules that the GPU used meanwhile, None where not known."""
        folder = RunFolder(Path(row.run_dir))
        step = folder.last_checkpoint_step()
        before = row.last_checkpoint_step
        ending = Ending(
            process=process or PROCESSES[row.state],
            exit_code=exit_code,
            blameless=blameless,
            less=less,
            progressed=step is not None and (before is None or step > before),
            error=_of_job(folder.read_error(), row.id),
            log=folder.tail_of_log(LOG_LINES),
        )
        while True:
            now = self.job(row.id)
            if (now.state, now.owner) != (row.state, row.owner):
                return None
            verdict = judge(now.state, now.stop_reason, now.crashes, ending)
            values: dict[str, Any] = {
                "owner": None,
                "crashes": verdict.crashes,
                "error": verdict.error,
                "exit_code": exit_code,
                "last_checkpoint_step": step,
            }
            if verdict.hold is not None:
                assert verdict.error is not None
                room = verdict.hold is Hold.NO_ROOM
                last = None if room and ending.progressed else now.error
                error = needing(verdict.error, folder, last) if room else trying_again(verdict.error, last)
                values |= {"hold": now.hold or verdict.hold, "error": error}
            ended_at, result = _now(now.created_at, now.started_at), None
            if now.state is JobState.RUNNING:
                attempt = now.history[-1]
                ended_at, since = _now(attempt["started_at"]), attempt["metrics_from"]
                result = folder.last_event("end", since)
                over = {
                    "ended_at": ended_at,
                    "ending": account(now.stop_reason, ending),
                    "reached_step": (folder.last_event("step", since) or {}).get("step"),
                    "checkpoint_step": step,
                    "energy_j": energy_j,
                }
                values["history"] = [*now.history[:-1], attempt | over]
            if verdict.state in FINAL:
                values |= {"ended_at": ended_at, "result": result}
            # A stop or a pause that arrives between the look and the write changes the verdict; then look again.
            as_seen = JobRow.hold.is_not_distinct_from(now.hold)
            if self._write(row.id, now.state, verdict.state, now, values, as_seen):
                return verdict.state

    @contextmanager
    def handling(self, row: JobRow) -> Iterator[None]:
        """A context for work on `row`, as `take` returned it. A UserError inside fails the job, and so does a run
        folder that is missing or cannot be opened: another try would fail in the same way."""
        try:
            yield
        except (UserError, *_CLOSED) as error:
            log.exception("job %d cannot be handled", row.id)
            self.give_up(row, error)

    def give_up(self, row: JobRow, error: Exception) -> None:
        """Record that the job of `row` has failed with `error`, without reading its run folder. A job that was to be
        cancelled is cancelled. Nothing happens when the job has changed since `row` was read."""
        recorded = (
            error
            if isinstance(error, UserError)
            else UserError(
                "This job could not be handled.",
                code="job-not-handled",
                numbers=(f"{type(error).__name__}: {first_line(error)}", f"run folder {row.run_dir}"),
                hint=f"daemon.log says more; offmate retry {row.id} tries it again",
            )
        )
        new = JobState.CANCELLED if row.stop_reason is StopReason.CANCEL else JobState.FAILED
        ended_at = _now(row.created_at, row.started_at)
        values: dict[str, Any] = {"owner": None, "error": recorded.to_json(), "ended_at": ended_at}
        last = row.history[-1] if row.history else None
        if isinstance(last, dict) and last.get("ended_at") is None:
            over = {"ended_at": ended_at, "ending": recorded.what, "reached_step": None, "checkpoint_step": None}
            values["history"] = [*row.history[:-1], last | over]
        self._write(row.id, row.state, new, row, values)

    def stop(self, job_id: int, reason: StopReason) -> JobState:
        """Ask a job to stop, and return the state that it is in then. CANCEL ends a job on which no process works at
        once; other reasons leave such a job as it is. A job on which a process works is marked, and the dispatcher
        tells the process. CANCEL is never replaced by another reason; final states stay."""
        while True:
            row = self.job(job_id)
            if row.state in FINAL or row.stop_reason in (reason, StopReason.CANCEL):
                return row.state
            if row.state in TAKEN_FROM:
                if self._write(job_id, row.state, row.state, row, {"stop_reason": reason}):
                    return row.state
            elif reason is not StopReason.CANCEL:
                return row.state
            else:
                values = {"stop_reason": reason, "ended_at": _now(row.created_at, row.started_at), "error": None}
                if self._write(job_id, row.state, JobState.CANCELLED, row, values):
                    return JobState.CANCELLED

    def retry(self, job_id: int, due: JobState) -> JobRow:
        """Change a failed or cancelled job's state back to `due` (SUBMITTED or WAITING), as if nothing had happened
        since its last checkpoint. Returns its row. Raises UserError `not-to-retry` when it neither failed nor was
        cancelled."""
        row = self.job(job_id)
        back: dict[str, Any] = {
            "stop_reason": None,
            "ended_at": None,
            "crashes": 0,
            "exit_code": None,
            "error": None,
            "result": None,
            "hold": None,
        }
        if row.state not in AGAIN or not self._write(job_id, row.state, due, row, back):
            row = self.job(job_id)
            verb = "resume" if row.hold is Hold.PAUSED else "release" if row.hold is Hold.HELD else "show"
            raise UserError(
                f"Job {job_id} is {row.hold or row.state}; only a job that failed or was cancelled can be tried again.",
                code="not-to-retry",
                exit_code=Exit.USAGE,
                hint=f"offmate {verb} {job_id}",
            )
        return self.job(job_id)

    def _write(
        self,
        job_id: int,
        state: JobState,
        new: JobState,
        seen: JobRow | None,
        values: dict[str, Any],
        *more: ColumnElement[bool],
    ) -> bool:
        """Compare and set: write the state `new` and `values` if the job is in `state` (with the owner, the stop reason
        and the attempts of `seen`, if given), and `more` holds. Else write nothing and return False. Raises ValueError
        for a transition that does not exist."""
        if new is not state and new not in NEXT[state]:
            raise ValueError(f"a job does not go from {state} to {new}")
        change = update(JobRow).where(JobRow.id == job_id, JobRow.state == state, *more)
        change = change.execution_options(synchronize_session=False)
        if seen is not None:
            change = change.where(
                JobRow.owner.is_not_distinct_from(seen.owner),
                JobRow.stop_reason.is_not_distinct_from(seen.stop_reason),
                JobRow.attempts == seen.attempts,
            )
        with self.writing() as session:
            if state in FINAL and new not in FINAL and seen is not None:  # another job may write there by now
                _check_free(session, seen.output_dir)
            return cast(CursorResult[Any], session.execute(change.values(state=new, **values))).rowcount == 1

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A context with a database session that writes, as one transaction. The threads of this process take turns by
        a lock: if they waited for SQLite's file lock, SQLite would let in whichever asks at the right moment, and some
        never. Raises TimeoutError."""
        if not self._turn.acquire(timeout=self._patience_s):
            raise TimeoutError(f"others have written to the database for {self._patience_s:g} s")
        try:
            with Session(self.engine, expire_on_commit=False) as session, session.begin():
                session.connection()  # begins, and so waits for other processes, before anything is done
                yield session
        finally:
            self._turn.release()

    def looking(self) -> Session:
        """Open a database session that only reads."""
        return Session(self._reading, expire_on_commit=False)


def _begun(row: JobRow) -> dict[str, Any]:
    """What a new attempt writes into the row of a waiting job."""
    folder, number = RunFolder(Path(row.run_dir)), row.attempts + 1
    now = _now(row.created_at, *(attempt["ended_at"] for attempt in row.history))
    from_step, metrics_from = None, 0
    with suppress(OSError):  # a folder that cannot be read fails the job once it is taken, see `handling`
        from_step, metrics_from = folder.last_checkpoint_step(), folder.metrics_end()
    attempt = {
        "number": number,
        "started_at": now,
        "from_step": from_step,
        "ended_at": None,
        "metrics_from": metrics_from,
    }
    started_at = now if row.started_at is None else row.started_at
    return {"started_at": started_at, "attempts": number, "history": [*row.history, attempt]}


def no_such_job(job_id: int) -> UserError:
    """Make the UserError `no-such-job`, for a number that no job has."""
    return UserError(
        f"There is no job {job_id}.", hint="offmate status", code="no-such-job", exit_code=Exit.NO_SUCH_JOB
    )


def _same_work(session: Session, row: JobRow, again: int | None) -> list[str]:
    """A note naming the newest other job that does the same and has neither failed nor been cancelled; none where there
    is no such job. The new job is not refused: people have their reasons."""
    same = select(JobRow).where(
        JobRow.fingerprint == row.fingerprint,
        JobRow.id.not_in({row.id, again or row.id}),
        JobRow.state.not_in(AGAIN),
    )
    if row.fingerprint is None or (other := session.scalars(same.order_by(JobRow.id.desc()).limit(1)).first()) is None:
        return []
    note = f"job {other.id}, which is {other.state}, is the same on the same data"
    return [f"{note}; offmate cancel {row.id} takes this one back"]


def _check_free(session: Session, output_dir: str | None) -> None:
    living = select(JobRow.id).where(JobRow.output_dir == output_dir, JobRow.state.not_in(FINAL)).limit(1)
    if output_dir is not None and (other := session.scalars(living).first()) is not None:
        raise UserError(
            f"Job {other} writes its model to {output_dir}, too.",
            code="output-taken",
            exit_code=Exit.USAGE,
            hint=f"give another output_dir, or offmate cancel {other}",
        )


def _now(*before: float | None) -> float:
    """The current time, or the latest of `before` where the clock has been set back meanwhile."""
    return max((time.time(), *(moment for moment in before if moment is not None)))


def _of_job(error: dict[str, Any] | None, number: int) -> dict[str, Any] | None:
    """The error that a process wrote, with the job's number in its hint; unchanged where it is in another form."""
    with suppress(KeyError, TypeError, ValueError):
        return error and UserError.from_json(error).of_job(number).to_json()
    return error

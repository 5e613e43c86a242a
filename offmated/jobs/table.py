"""Defines the database tables of jobs and of facts about the whole machine ("wishes"). The planner's cache has its own
tables in the same database, see planner/cache/tables.py."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum as PythonEnum
from typing import Any

from sqlalchemy import JSON, Dialect, Enum, Float, Index, Integer, String, Text, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from offmated.jobs.states import Hold, JobState, StopReason


def _values(kind: type[PythonEnum]) -> list[str]:
    return [str(member.value) for member in kind]


KEY_LENGTH = 64
WINDOW_LENGTH = 128
_ATTEMPT = {"number", "started_at", "from_step", "metrics_from", "ended_at"}
_ERROR = {"what", "numbers", "hint", "code", "exit_code"}


class _Told(TypeDecorator[Any]):
    """A JSON column whose values have the form that `is_it` checks. A damaged value is read as `otherwise`: its content
    is lost, but neither the job nor a list of jobs fails because of it."""

    impl = JSON
    cache_ok = True

    def __init__(self, is_it: Callable[[Any], bool], otherwise: tuple[()] | None = None) -> None:
        super().__init__(none_as_null=otherwise is None)
        self.is_it = is_it
        self.otherwise = otherwise

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[Any], Any]:
        """A function that converts a value read from the database to the column's Python value."""
        read = super().result_processor(dialect, coltype)
        assert read is not None

        def told(value: Any) -> Any:
            try:
                result = read(value)
            except ValueError:
                result = None
            if result is not None and self.is_it(result):
                return result
            return None if self.otherwise is None else list(self.otherwise)

        return told


def _is_history(value: Any) -> bool:
    return _is_list(value) and all(isinstance(attempt, dict) and attempt.keys() >= _ATTEMPT for attempt in value)


def _is_error(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() >= _ERROR


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


class Base(DeclarativeBase):
    """The SQLAlchemy base class of the daemon's tables."""


class JobRow(Base):
    """One job. Times are seconds since 1970; they keep the order of events even where the clock was set back.

    `owner` is the process that works on the job now (`str(planner.run.processes.Process)`), `stop_reason` why the job
    is to stop, or last stopped. `started_at` is its first start, `attempts` counts its starts, and `history` has for
    each attempt {"number", "started_at", "from_step", "metrics_from", "ended_at", "ending", "reached_step",
    "checkpoint_step", "energy_j"}: `from_step` is the step of the checkpoint from which it went on, `metrics_from` the
    byte of metrics.jsonl where its events begin, `ending` says in words how it ended, `reached_step` is its last step,
    `checkpoint_step` that of the newest checkpoint then, `energy_j` the joules that the GPU used (null where not
    known). A damaged history is read as empty, and goes on from there. `crashes` counts the deaths of its process since
    the last new checkpoint.

    `error` has the fields of `UserError`, with which the last process ended, for a job that has failed or that waits
    until the error has passed; then it also says when the job is tried again (`again`, offmated/jobs/again.py).
    `result` is the trainer's last "end" event. `submission_key` is the client's name for its submission, under which it
    can submit again when it got no answer; `notes` are the notes that the client got. `output_dir` is the real path of
    the model's folder, where the job names one.

    In the queue a higher `priority` comes first, then a lower `position`. A job does not start while it has a `hold`,
    nor use the GPU before `begin_at` and before the job `after_id` is done. `label` is a word that the user chose.
    `window` is the text of the `planner.keys.window.Window`, the hours in which the job may have the GPU, None for any
    time. `fingerprint` is equal for two jobs that do the same on the same data; None for an adopted job."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_queue", "state", "priority", "position", "hold", "begin_at", "after_id"),
        {"sqlite_autoincrement": True},  # a job's number is never used again
    )

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(255))
    state: Mapped[JobState] = mapped_column(Enum(JobState, native_enum=False, length=16, values_callable=_values))
    stop_reason: Mapped[StopReason | None] = mapped_column(
        Enum(StopReason, native_enum=False, length=16, values_callable=_values)
    )
    priority: Mapped[int] = mapped_column(Integer, default=0)
    run_dir: Mapped[str] = mapped_column(Text)
    owner: Mapped[str | None] = mapped_column(String(128))
    created_at: Mapped[float] = mapped_column(Float)
    started_at: Mapped[float | None] = mapped_column(Float)
    ended_at: Mapped[float | None] = mapped_column(Float)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    history: Mapped[list[dict[str, Any]]] = mapped_column(_Told(_is_history, ()), default=list)
    crashes: Mapped[int] = mapped_column(Integer, default=0)
    last_checkpoint_step: Mapped[int | None] = mapped_column(Integer)
    exit_code: Mapped[int | None] = mapped_column(Integer)
    error: Mapped[dict[str, Any] | None] = mapped_column(_Told(_is_error))
    result: Mapped[dict[str, Any] | None] = mapped_column(_Told(_is_object))
    submission_key: Mapped[str | None] = mapped_column(String(KEY_LENGTH), index=True, unique=True)
    notes: Mapped[list[str]] = mapped_column(_Told(_is_list, ()), default=list)
    output_dir: Mapped[str | None] = mapped_column(Text, index=True)
    position: Mapped[int] = mapped_column(Integer, index=True)
    label: Mapped[str | None] = mapped_column(String(KEY_LENGTH), index=True)
    hold: Mapped[Hold | None] = mapped_column(Enum(Hold, native_enum=False, length=16, values_callable=_values))
    after_id: Mapped[int | None] = mapped_column(Integer)
    begin_at: Mapped[float | None] = mapped_column(Float)
    window: Mapped[str | None] = mapped_column(String(WINDOW_LENGTH))
    fingerprint: Mapped[str | None] = mapped_column(String(32), index=True)


class WishRow(Base):
    """A fact about the whole machine: its name, and the time since when it holds. "pause": no job is to work; "yield":
    no job is to use the GPU. Other names record the time up to which an address or a tracker was told everything."""

    __tablename__ = "wishes"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    since: Mapped[float | None] = mapped_column(Float)


metadata = Base.metadata

"""Hands due jobs to the workers, tells processes to stop, and takes back the jobs of processes that died.

It decides from the database alone, and hands out one job per worker at a time: the order of the others stays in the
database, where it can still change. A lost message is sent again; a message that comes twice finds that its job has
been taken."""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import redis
from sqlalchemy.exc import OperationalError

from offmated.jobs.queue_changes import go_on, is_paused, is_too_late, until_next_window, yields
from offmated.jobs.states import TAKEN_FROM, JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from offmated.repeated_errors import RepeatedErrors
from offmated.service.broker import ANSWER_PATIENCE_S, QUEUES, TASKS, Broker
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.run.watch import end_leftover

log = logging.getLogger(__name__)

GO_ON_EVERY_S = 5.0
LOST_AFTER_S = 5.0  # by then a message that has left its queue has led to a taken job, or is lost
GIVEN_UP_AFTER_S = 60.0  # an error of the system may pass; after this time the job fails


class Dispatcher:
    """Does the daemon's regular work on the queue, all that `parts` lists, a few times a second and whenever something
    may have changed."""

    def __init__(self, store: Store, broker: Broker) -> None:
        self._store = store
        connection = broker.connect(ANSWER_PATIENCE_S)
        self._queues = {name: broker.queue(name, connection) for name in QUEUES}
        self._errors = RepeatedErrors()
        self._sent: dict[str, tuple[tuple[int, int, int], float]] = {}
        self._silent_since: float | None = None
        self._go_on_due = 0.0
        self._blameless: set[str | None] = set()  # workers that went down with a daemon
        self._since: dict[int, float] = {}  # jobs that cannot be taken back, and since when

    def parts(self, states: frozenset[JobState]) -> tuple[tuple[str, Callable[[], None]], ...]:
        """The functions to call now, in order, each with words for the log; `states` are the states in which there are
        jobs. With an empty queue the result is empty, so that the database is not asked."""
        worked_on = (
            ("taking jobs back", self.adopt),
            ("pausing jobs", self.keep_paused),
            ("keeping to windows", self.keep_windows),
            ("passing stops on", self.pass_on_stops),
        )
        idle = ("having jobs go on", self.have_go_on), ("handing jobs out", self.hand_out)
        return (*(worked_on if states & TAKEN_FROM.keys() else ()), *(idle if states & {*TAKEN_FROM.values()} else ()))

    def adopt(self, *, blameless: bool = False) -> None:
        """Take back the jobs whose worker process died without recording how they ended. `blameless`: they went down
        with the daemon or the machine, as in `Ending`; this also holds for those of these jobs that are taken back only
        later. A job that cannot be taken back keeps no other waiting, and does not block its worker for ever: it
        fails."""
        rows = self._store.jobs(*QUEUES.values())
        if blameless:
            self._blameless = {row.owner for row in rows}
        self._since = {row.id: self._since[row.id] for row in rows if row.id in self._since}
        for row in rows:
            with self._errors.of(f"taking back job {row.id}", Exception):
                try:
                    self._adopt(row)
                    self._since.pop(row.id, None)
                except (OperationalError, TimeoutError):  # the database is busy; or the process lives on and
                    # holds what the next one needs
                    raise
                except Exception as error:
                    since = self._since.setdefault(row.id, time.monotonic())
                    if isinstance(error, OSError) and time.monotonic() - since < GIVEN_UP_AFTER_S:
                        raise
                    log.exception("job %d cannot be taken back, and has failed", row.id)
                    self._store.give_up(row, error)

    def _adopt(self, row: JobRow) -> None:
        assert row.owner is not None
        owner = Process.parse(row.owner)
        if owner.alive():
            return
        end_leftover(RunFolder(Path(row.run_dir)))
        blameless = row.owner in self._blameless or not owner.this_boot()
        state = self._store.end(row, None, blameless=blameless)
        if state is not None:
            log.warning("the process that worked on job %d is gone; the job is %s", row.id, state)

    def pass_on_stops(self) -> None:
        """Send SIGTERM to the processes of jobs that are to stop. It is sent at each call, as the first signal may have
        come too early."""
        for row in self._store.jobs(*QUEUES.values()):
            if row.stop_reason is not None and row.owner is not None:
                with self._errors.of(f"stopping job {row.id}", Exception):
                    Process.parse(row.owner).send(signal.SIGTERM)

    def keep_paused(self) -> None:
        """Make a running job save a checkpoint and end if it is held, if the whole machine is paused, or if another
        program wants the GPU. This also stops a job that was on its way to a worker when it was paused."""
        rows = self._store.jobs(JobState.RUNNING)
        paused = bool(rows) and is_paused(self._store)
        for row in rows:
            if (paused or row.hold is not None) and row.stop_reason is None:
                self._store.stop(row.id, StopReason.PAUSE)
            elif row.stop_reason is None and yields(self._store):
                self._store.stop(row.id, StopReason.YIELD)

    def keep_windows(self) -> None:
        """Make a running job save a checkpoint and end before its window (the hours in which it may have the GPU)
        closes."""
        for row in self._store.jobs(JobState.RUNNING):
            with self._errors.of(f"looking at the window of job {row.id}", ValueError):
                if row.stop_reason is None and is_too_late(row):
                    until_next_window(self._store, row)
                    self._store.stop(row.id, StopReason.WINDOW)

    def have_go_on(self) -> None:
        """Let jobs go on that waited for space on their disks, once it is free, or for the hub."""
        if time.monotonic() >= self._go_on_due:
            self._go_on_due = time.monotonic() + GO_ON_EVERY_S
            for number in go_on(self._store):
                log.info("job %d goes on: there is room, or the hub is asked again", number)

    def hand_out(self) -> None:
        """Send each idle worker, through the broker, the number of the job that is due next."""
        if is_paused(self._store):
            return
        for name, phase in QUEUES.items():
            if not self._store.jobs(phase) and not (phase is JobState.RUNNING and yields(self._store)):
                with self._errors.of(f"sending to the {name} worker", redis.RedisError):
                    self._send_next(name, phase)

    def broker_silent_s(self) -> float:
        """The seconds for which the broker has been reachable without answering."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def _send_next(self, name: str, phase: JobState) -> None:
        while due := self._store.due(phase, 1):
            try:
                if phase is JobState.PLANNING or not is_too_late(due[0]):
                    break
                until_next_window(self._store, due[0])
            except ValueError as error:  # its window is not valid: the job could have the GPU when it must not
                log.exception("job %d cannot be handed out, and has failed", due[0].id)
                self._store.give_up(due[0], error)
        else:
            return
        try:
            self._send(name, due[0])
            self._silent_since = None
        except redis.TimeoutError:
            self._silent_since = self._silent_since or time.monotonic()
            raise
        except redis.RedisError:  # the broker is away, or has answered with an error
            self._silent_since = None
            raise

    def _send(self, name: str, row: JobRow) -> None:
        message = (row.id, row.attempts, row.crashes)
        sent, when = self._sent.get(name, (None, 0.0))
        queue = self._queues[name]
        waiting = {text.partition("-")[0] for text in queue.job_ids}
        if str(row.id) in waiting or (message == sent and time.monotonic() - when < LOST_AFTER_S):
            return
        queue.enqueue(
            TASKS[name], row.id, job_id=f"{row.id}-{uuid.uuid4().hex}", job_timeout=-1, result_ttl=0, failure_ttl=60
        )
        self._sent[name] = (message, time.monotonic())

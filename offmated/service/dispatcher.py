"""Moves due jobs to the workers, tells processes to stop, and takes in what the dead left behind.

It decides from the database alone, and hands out one job per worker at a time: the order of the others stays where it
can still change. A message that is lost is sent again; one that comes twice finds its job taken.
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from pathlib import Path

import redis

from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from offmated.service.broker import QUEUES, TASKS, Broker
from offmated.trouble import Troubles
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.run.watch import end_leftover

log = logging.getLogger(__name__)

LOST_AFTER_S = 5.0  # a message that has left its queue has become a taken job by then, or is lost


class Dispatcher:
    """`tick()` is called a few times a second, and whenever something may have changed."""

    def __init__(self, store: Store, broker: Broker) -> None:
        self._store = store
        connection = broker.connect()
        self._queues = {name: broker.queue(name, connection) for name in QUEUES}
        self._troubles = Troubles()
        self._sent: dict[str, tuple[tuple[int, int, int], float]] = {}

    def adopt(self, *, blameless: bool = False) -> None:
        """Take jobs back whose worker died without saying how they ended. `blameless` as in `Ending`. One that cannot
        be taken back keeps no other from it."""
        for row in self._store.jobs(*QUEUES.values()):
            with self._troubles.of(f"taking back job {row.id}", Exception):
                self._adopt(row, blameless)

    def _adopt(self, row: JobRow, blameless: bool) -> None:
        assert row.owner is not None
        owner = Process.parse(row.owner)
        if owner.alive():
            return
        end_leftover(RunFolder(Path(row.run_dir)))
        state = self._store.end(row, None, blameless=blameless or not owner.this_boot())
        if state is not None:
            log.warning("the process that worked on job %d is gone; the job is %s", row.id, state)

    def pass_on_stops(self) -> None:
        """SIGTERM to the processes of jobs that are to stop. Each time: the first may have come too early."""
        for row in self._store.jobs(*QUEUES.values()):
            if row.stop_reason is not None and row.owner is not None:
                Process.parse(row.owner).send(signal.SIGTERM)

    def hand_out(self) -> None:
        """Send each idle worker the job that is due next."""
        for name, phase in QUEUES.items():
            if not self._store.jobs(phase):
                with self._troubles.of(f"sending to the {name} worker", redis.RedisError):
                    self._send_next(name, phase)

    def _send_next(self, name: str, phase: JobState) -> None:
        due = self._store.due(phase)
        if not due:
            return
        row = due[0]
        message = (row.id, row.attempts, row.crashes)
        sent, when = self._sent.get(name, (None, 0.0))
        queue = self._queues[name]
        waiting = {int(text.partition("-")[0]) for text in queue.job_ids}
        if row.id in waiting or (message == sent and time.monotonic() - when < LOST_AFTER_S):
            return
        queue.enqueue(
            TASKS[name], row.id, job_id=f"{row.id}-{uuid.uuid4().hex}", job_timeout=-1, result_ttl=0, failure_ttl=60
        )
        self._sent[name] = (message, time.monotonic())

"""Runs the daemon's side of the trackers: decides which runs' figures are sent to which tracker, and keeps the
processes that send them.

A tracker that fails is tried again, after longer and longer pauses; its failure does not affect the job. The database
has the time up to which all ended jobs are sent, so that a new daemon goes on where the last one stopped."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offmated.jobs import listing
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow, WishRow
from offmated.trackers.feed import OVER, is_told, note_of
from planner.errors import Exit
from planner.keys.source import read_text, read_yaml
from planner.keys.trackers import TRACKERS
from planner.run.folder import RunFolder

log = logging.getLogger(__name__)

EVERY_S, SELDOM_S = 2.0, 15.0
FIRST_DELAY_S, LONGEST_DELAY_S = 30.0, 1800.0
LONGEST_CLOSE_S = 600.0  # for a tracker to take the remaining figures when a run has ended
GIVE_UP_S = 86400.0  # after a run's end
END_PATIENCE_S = 5.0
_AT_ONCE = 2  # processes at once for runs that are over
_MARK = "trackers-told"
_FEED = (sys.executable, "-P", "-m", "offmated.trackers.feed")


def trackers_of(run: RunFolder) -> tuple[str, ...]:
    """The names of the trackers to which the run's figures are sent; none where its job cannot be read."""
    with suppress(Exception):
        values = read_yaml(read_text(run.resolved, longest=None), run.resolved.name, longest=None).values
        wanted = values.get("report_to")
        return tuple(name for name in wanted if name in TRACKERS) if isinstance(wanted, list) else ()
    return ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run whose figures are to be sent to trackers. `ended_at`: seconds since 1970; None while the run has the
    GPU."""

    row: JobRow
    ended_at: float | None

    @property
    def run(self) -> RunFolder:
        """The run's folder, as an object that knows its files."""
        return RunFolder(Path(self.row.run_dir))


class Feed:
    """Sends the figures of one run to one tracker, by one process at a time."""

    def __init__(self, wanted: Wanted, tracker: str, state: Path, environment: Mapping[str, str]) -> None:
        self._job, self._tracker, self._state, self._environment = wanted, tracker, state, environment
        self._child: subprocess.Popen[bytes] | None = None
        self._closed_at: float | None = None
        self._due = 0.0
        self._delay_s = FIRST_DELAY_S
        self._hopeless = False

    @property
    def at_work(self) -> bool:
        """Whether a process is sending figures now."""
        return self._child is not None

    def rests(self, ended_at: float | None) -> bool:
        """Whether nothing is left to send for a run that ended at `ended_at` (seconds since 1970; None: not yet)."""
        if self.at_work:
            return False
        given_up = ended_at is not None and time.time() - ended_at > GIVE_UP_S
        return self._hopeless or given_up or is_told(self._job.run, self._tracker)

    def tick(self, *, over: bool, ended: bool, may_start: bool = True) -> None:
        """Start the process that sends the figures, or check on it. `over`: the run writes nothing for now. `ended`:
        the job has ended."""
        if self._child is not None:
            self._see(self._child, over, ended)
        elif may_start and not self._hopeless and time.monotonic() >= self._due:
            try:
                self._start()
            except OSError as error:  # no room, or its folder is gone: this must not stop other feeds
                self._later(f"{error}")

    def close(self, *, ended: bool = False) -> None:
        """Make the process send the remaining figures, and end. `ended`: the job has ended."""
        if self._child is not None and self._closed_at is None:
            self._closed_at = time.monotonic()
            assert self._child.stdin is not None
            with suppress(OSError):
                if ended:
                    self._child.stdin.write(OVER)
                    self._child.stdin.flush()
            with suppress(OSError):
                self._child.stdin.close()

    def wait(self, until: float) -> None:
        """Wait until the process has ended, at most until the time `until` (seconds of `time.monotonic`); then kill
        it."""
        if self._child is not None:
            try:
                self._child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._child.kill()

    def _see(self, child: subprocess.Popen[bytes], over: bool, ended: bool) -> None:
        if over:
            self.close(ended=ended)
        if (code := child.poll()) is None:
            if self._closed_at is not None and time.monotonic() - self._closed_at > LONGEST_CLOSE_S:
                child.kill()
            return
        self.close()
        self._child = None
        if code == 0:
            self._delay_s = FIRST_DELAY_S
            return
        self._hopeless = code == Exit.USAGE
        self._later(f"exit code {code}; why is in {self._log}")

    def _later(self, why: str) -> None:
        again = "" if self._hopeless else f", and is tried again in {self._delay_s:.0f} s"
        log.warning("%s was not told of job %d%s: %s", self._tracker, self._job.row.id, again, why)
        self._due = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    @property
    def _log(self) -> Path:
        return note_of(self._job.run, self._tracker).with_suffix(".log")

    def _start(self) -> None:
        row, run = self._job.row, self._job.run
        request = {
            "tracker": self._tracker,
            "run": str(run.path),
            "name": row.name,
            "daemon": os.getpid(),
            "state": str(self._state),
            "first": self._delay_s == FIRST_DELAY_S,
        }
        self._log.parent.mkdir(mode=0o700, exist_ok=True)
        with self._log.open("wb") as output:
            self._child = subprocess.Popen(
                _FEED,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=self._state,
                env=_not_private(os.environ) | dict(self._environment),
                start_new_session=True,
            )
        self._closed_at = None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()


def _not_private(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the daemon's own secrets, which no tracker needs."""
    return {name: value for name, value in environment.items() if name not in ("OFFMATE_NOTIFY", "OFFMATE_TOKEN")}


class Feeder:
    """Sends the figures of all runs to their trackers. `tick` is called often, and never waits."""

    def __init__(self, store: Store, state: Path, environment: Mapping[str, str]) -> None:
        self._store, self._state, self._environment = store, state, environment
        self._feeds: dict[tuple[int, str], Feed] = {}
        self._asked: dict[int, tuple[str, ...]] = {}
        self._due = 0.0
        self._look = True  # once at the start, for runs that the last daemon left

    def tick(self, states: frozenset[JobState]) -> None:
        """Start, check and end the processes that send figures. `states`: the states in which there are jobs."""
        self._look |= JobState.RUNNING in states
        if not (self._look or self._feeds) or time.monotonic() < self._due:
            return
        running = [Wanted(row, None) for row in self._store.jobs(JobState.RUNNING)]
        since = self._mark()
        ended = [Wanted(job.row, job.row.ended_at) for job in listing.ended_since(self._store, since)]
        wanted = {job.row.id: job for job in (*ended, *running)}
        self._asked = {number: self._trackers(job) for number, job in wanted.items()}
        self._tick_feeds(wanted)
        told_until = since
        for job in ended:
            if not all(self._rests(job, tracker) for tracker in self._asked[job.row.id]):
                break
            told_until = job.ended_at or told_until
        if told_until > since:
            with self._store.writing() as session:
                session.merge(WishRow(name=_MARK, since=told_until))
        unfinished = [job for job in ended if (job.ended_at or 0.0) > told_until]
        self._look = bool(running or unfinished)
        busy = running or any(feed.at_work for feed in self._feeds.values())
        self._due = time.monotonic() + (EVERY_S if busy else SELDOM_S if unfinished else 0.0)

    def close(self) -> None:
        """Make all processes send the remaining figures and end, because the daemon ends."""
        for feed in self._feeds.values():
            feed.close()

    def wait(self) -> None:
        """Wait until the processes have ended, at most `END_PATIENCE_S` seconds."""
        until = time.monotonic() + END_PATIENCE_S
        for feed in self._feeds.values():
            feed.wait(until)

    def _tick_feeds(self, wanted: Mapping[int, Wanted]) -> None:
        for number, job in wanted.items():
            for tracker in self._asked[number]:
                if (number, tracker) not in self._feeds and (job.ended_at is None or not is_told(job.run, tracker)):
                    self._feeds[number, tracker] = Feed(job, tracker, self._state, self._environment)
        late = 0
        for (number, tracker), feed in list(self._feeds.items()):
            wanted_job = wanted.get(number)  # None: the job waits, or is over and fully told
            over = wanted_job is None or wanted_job.ended_at is not None
            late += over and feed.at_work
            ended = wanted_job is not None and wanted_job.ended_at is not None
            feed.tick(over=over, ended=ended, may_start=wanted_job is not None and (not over or late < _AT_ONCE))
            if over and not feed.at_work and (wanted_job is None or is_told(wanted_job.run, tracker)):
                del self._feeds[number, tracker]

    def _rests(self, job: Wanted, tracker: str) -> bool:
        feed = self._feeds.get((job.row.id, tracker))
        return feed.rests(job.ended_at) if feed is not None else is_told(job.run, tracker)

    def _trackers(self, job: Wanted) -> tuple[str, ...]:
        known = self._asked.get(job.row.id)
        return trackers_of(job.run) if known is None else known

    def _mark(self) -> float:
        """The moment up to which all jobs that ended are told. The first time it is now: no earlier job is told."""
        with self._store.looking() as session:
            row = session.get(WishRow, _MARK)
        if row is not None and row.since is not None:
            return row.since
        now = time.time()
        with self._store.writing() as session:
            session.merge(WishRow(name=_MARK, since=now))
        return now

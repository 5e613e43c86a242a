"""Sends people messages on their jobs: which are done, failed or need disk space, and in the morning a report of all.

The database records for each address what was sent. So a daemon that ends before it has sent something sends it at its
next start, and an address that does not answer keeps no other waiting."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select

from offmated.api.report import outcome, report
from offmated.api.views import job_view
from offmated.jobs import listing
from offmated.jobs.listing import Listed
from offmated.jobs.states import FINAL, Hold, JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.table import WishRow
from planner.units import printable

log = logging.getLogger(__name__)

EVERY_S = 2.0
FIRST_DELAY_S, LONGEST_DELAY_S = 30.0, 1800.0
_TOLD, _REPORTED = "told", "reported"
_TO_TELL = (JobState.DONE, JobState.FAILED)
_MOST_TEXT = 8000
_SENDER = (sys.executable, "-P", "-m", "offmated.service.notify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to be sent. Once it is sent, `marks` are written to the database, and `key` is remembered by this
    daemon, so that it is not sent again."""

    title: str
    body: str
    marks: Mapping[str, float] = field(default_factory=dict)
    key: str | None = None


def forget_others(store: Store, addresses: Sequence[str]) -> None:
    """Delete the record of what was sent to addresses other than these: an address that comes back later gets only
    messages on what happens then."""
    with store.writing() as session:
        for row in session.scalars(select(WishRow)).all():
            name, dash, address = row.name.partition("-")
            if dash and name in (_TOLD, _REPORTED) and address not in addresses:
                session.delete(row)


class Notifier:
    """Sends messages to one address. `tick()` is called often, and never waits. `folder` and `environment`: those of
    the process that sends. `address`: the address's name, as `address_names` gives it."""

    def __init__(self, store: Store, folder: Path, environment: Mapping[str, str], address: str) -> None:
        self._store = store
        self._address = address
        self._folder = folder
        self._environment = environment
        self._due = 0.0
        self._delay_s = FIRST_DELAY_S
        self._known: set[str] = set()
        self._sending: tuple[subprocess.Popen[bytes], Message] | None = None

    def tick(self) -> None:
        """While a message is being sent, check whether it has been sent; otherwise start sending the next one."""
        if self._sending is not None:
            self._see()
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY_S
            if (message := self.next()) is not None:
                self._send(message)

    def next(self) -> Message | None:
        """The message that is to be sent next; None if there is none."""
        told_until, reported = self._mark(_TOLD), self._mark(_REPORTED)
        if over := listing.ended_since(self._store, told_until, states=_TO_TELL):
            return _ended(over)
        active = listing.queue(self._store, limit=listing.FORESEEN).jobs
        for job in active:
            key = f"room-{job.row.id}-{job.row.attempts}"
            if job.row.hold is Hold.NO_ROOM and key not in self._known:
                view = job_view(job)
                return Message(title=f"job {job.row.id} ({job.row.name}) needs room", body=view["reason"], key=key)
        return self._morning(active, reported)

    def taken(self, message: Message) -> None:
        """Record that `message` was sent."""
        if message.key is not None:
            self._known.add(message.key)
        if message.marks:
            with self._store.writing() as session:
                for name, at in message.marks.items():
                    session.merge(WishRow(name=self._named(name), since=at))

    def _morning(self, active: Sequence[Listed], reported: float) -> Message | None:
        """The report: due when a job was stopped at its window's end, or when several jobs have ended and no job of the
        queue can go on by itself."""
        now = time.time()
        night_over = [
            job.row.history[-1]["ended_at"]
            for job in active
            if job.row.stop_reason is StopReason.WINDOW and job.row.state is JobState.WAITING and job.row.history
        ]
        several = len(listing.ended_since(self._store, reported, 2)) > 1  # about a single job all has been told
        stands_still = all(job.row.hold not in (None, Hold.NO_HUB) for job in active)  # NO_HUB goes on by itself
        if any((ended or 0.0) > reported for ended in night_over) or (several and stands_still):
            summary = report(self._store, reported)
            return Message(
                title=f"report: {summary['title']}", body="\n".join(summary["lines"]), marks={_REPORTED: now}
            )
        return None

    def _mark(self, name: str) -> float:
        """The moment up to which things of this name were told. The first time it is now: nothing earlier is told."""
        with self._store.looking() as session:
            row = session.get(WishRow, self._named(name))
        if row is not None and row.since is not None:
            return row.since
        now = time.time()
        with self._store.writing() as session:
            session.merge(WishRow(name=self._named(name), since=now))
        return now

    def _named(self, mark: str) -> str:
        return f"{mark}-{self._address}"

    def _send(self, message: Message) -> None:
        title, body = printable(f"offmate: {message.title}"), printable(message.body[:_MOST_TEXT])
        request = {"title": title, "body": body, "address": self._address}
        text = json.dumps(request).encode()
        child = subprocess.Popen(
            _SENDER,
            stdin=subprocess.PIPE,
            cwd=self._folder,
            env={**os.environ, **self._environment},
            start_new_session=True,
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError), child.stdin:  # the exit code tells; a pipe takes this much without a reader
            child.stdin.write(text)
        self._sending = child, message

    def _see(self) -> None:
        assert self._sending is not None
        child, message = self._sending
        if (code := child.poll()) is None:
            return
        self._sending = None
        if code == 0:
            self.taken(message)
            self._delay_s = FIRST_DELAY_S
            return
        log.warning("%r was not told, and will be in %.0f s: exit code %d", message.title, self._delay_s, code)
        self._due = time.monotonic() + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)


def _ended(over: Sequence[Listed]) -> Message:
    views = [job_view(job) for job in over]
    last = max(view["ended_at"] for view in views)
    if len(views) == 1:
        (view,) = views
        error = view["error"] or {}
        body = [view["output"] or "", *([error["what"], *error["numbers"], error["hint"]] if error else [])]
        return Message(title=outcome(view), body="\n".join(filter(None, body)) or view["run_dir"], marks={_TOLD: last})
    lines = [outcome(view) for view in views]
    assert all(view["state"] in FINAL for view in views)
    return Message(title=f"{len(views)} jobs have ended", body="\n".join(lines), marks={_TOLD: last})

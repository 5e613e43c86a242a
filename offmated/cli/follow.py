"""Following a job from outside: its states, its plan, its loss, until it is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from offmated.cli import views
from offmated.client import Client
from offmated.states import FINAL
from planner.errors import UserError

POLL_S = 0.5
LINE_EVERY_S = 10.0


def follow(client: Client, job_id: int, screen: Console) -> dict[str, Any]:
    """Say what happens to the job until it is over; returns it as it is then.

    Leaving with Ctrl-C leaves the job alone, and says so before the KeyboardInterrupt goes on.
    """
    news = News(client, screen)
    try:
        with screen.status("") as line:  # a moving line on terminals, nothing elsewhere
            while True:
                try:
                    job = client.job(job_id)
                    news.tell(job)
                except UserError as error:
                    if error.code != "daemon-silent":
                        raise
                    line.update("the daemon does not answer; the job may go on meanwhile")
                    continue
                if job["state"] in FINAL:
                    return job
                line.update(" ".join(filter(None, (job["state"], views.progress(job), views.remaining(job)))))
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        screen.print(f"Job {job_id} goes on without you.  offmate logs -f {job_id} · offmate cancel {job_id}")
        raise


def events(client: Client, job_id: int, following: bool) -> Iterator[dict[str, Any]]:
    """The trainer's events of a job; with `following` as they come, until it is over."""
    told = 0
    while True:
        last = not following or client.job(job_id)["state"] in FINAL  # asked before reading, so that none is missed
        new = client.metrics(job_id, told)
        yield from new
        told += len(new)
        if last:
            return
        time.sleep(POLL_S)


class News:
    """Remembers what has been said of a job, and says the rest."""

    def __init__(self, client: Client, screen: Console) -> None:
        self._client = client
        self._screen = screen
        self._state = ""
        self._plan: dict[str, Any] | None = None
        self._step = 0
        self._line_due = 0.0

    def tell(self, job: dict[str, Any]) -> None:
        """Say what is new, an ending last."""
        over = job["state"] in FINAL
        if not over:
            self._tell_state(job)
        if job["plan"] is not None and job["plan"] != self._plan:
            self._plan = job["plan"]
            answer = self._client.plan(job["id"])
            if answer is not None:
                self._screen.print(views.plan(answer))
        self._tell_loss(job)
        if over:
            self._tell_state(job)

    def _tell_state(self, job: dict[str, Any]) -> None:
        if job["state"] != self._state:
            self._state = job["state"]
            self._screen.print(f"{self._state}  {job['reason']}".rstrip())

    def _tell_loss(self, job: dict[str, Any]) -> None:
        found, over = job["progress"], job["state"] in FINAL
        if not found or found["loss"] is None or found["step"] == self._step:
            return
        if over or time.monotonic() >= self._line_due:
            self._step = found["step"]
            self._line_due = time.monotonic() + LINE_EVERY_S
            left = f", {views.remaining(job)} left" if views.remaining(job) else ""
            self._screen.print(f"step {found['step']} of {found['total_steps']}, loss {found['loss']:.3f}{left}")

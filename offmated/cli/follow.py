"""Follows a job by asking the daemon until the job is over: prints its states, its plan, its loss."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from offmated.cli import job_view
from offmated.cli.client import Client
from offmated.cli.output import console, say
from offmated.jobs.figures import why_replaced
from offmated.jobs.states import FINAL, JobState
from planner.errors import Exit, UserError
from planner.run.events import Piece, pair_words
from planner.run.folder import RunFolder
from planner.units import counted, format_seconds

POLL_S = 0.5
LINE_EVERY_S = 10.0
SLOW_S = 1.0
LOOKING = "checking the job and its first records; Ctrl-C takes the job back"
PLAN_PATIENCE_S = 20.0


def is_over(job: dict[str, Any]) -> bool:
    """Whether the job, as the API describes it, is done, failed or cancelled."""
    return job["state"] in FINAL


def is_rehearsed(job: dict[str, Any]) -> bool:
    """Whether `submit` need not follow a new job further: it has shown that it runs, or it waits for something, or it
    is over. A job whose reference model scores all answers first, for longer than a few seconds, is not waited for."""
    return is_over(job) or job["kept"] or job_view.first_steps_done(job) or bool(job_view.scoring(job))


def follow(
    client: Client, job_id: int, screen: Console, until: Callable[[dict[str, Any]], bool] = is_over
) -> dict[str, Any]:
    """Print what happens to a job until `until` is true for it. Returns the job, as the API describes it, at that
    moment.

    Ctrl-C does not stop the job; this is printed before the KeyboardInterrupt goes on."""
    news = News(client, screen)
    try:
        with screen.status("") as line:  # a moving line on terminals, nothing elsewhere
            while True:
                try:
                    job = client.job(job_id)
                    news.tell(job)
                except UserError as error:
                    if error.code == "daemon-not-running":
                        raise left_alone(job_id) from None
                    if error.code != "daemon-silent":
                        raise
                    line.update("the daemon does not answer; the job may still run")
                    continue
                if until(job):
                    return job
                parts = (job["standing"], job_view.progress(job), job_view.remaining(job), job_view.scoring(job))
                line.update(" ".join(filter(None, parts)))
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        screen.print(f"Job {job_id} goes on without you.  offmate logs -f {job_id} · offmate cancel {job_id}")
        raise


def hand_in(client: Client, screen: Console, send: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Submit a job by calling `send` with a new submission key, and return the job. If that takes longer than `SLOW_S`
    seconds, and stderr is a terminal, a line there says why. Ctrl-C takes the job back, and prints so before the
    KeyboardInterrupt goes on."""
    key = uuid.uuid4().hex
    slow = threading.Timer(SLOW_S, console(stderr=True).print, [LOOKING])
    slow.daemon = True
    if sys.stderr.isatty():
        slow.start()
    try:
        return send(key)
    except KeyboardInterrupt:
        slow.cancel()
        screen.print("Taking the job back.  Ctrl-C again leaves it in the queue: offmate status")
        job = send(key)  # the same job: the daemon may be taking it in, and only its answer has the job's number
        screen.print(job_view.cancelled(client.cancel(job["id"])))
        raise
    finally:
        slow.cancel()


def rehearse(client: Client, job: dict[str, Any], screen: Console) -> dict[str, Any]:
    """Follow a new job through its first steps: until it has shown that it runs, cannot show it now, or is over.
    Returns the job as it is then. It waits a moment for the plan first, as the first text contains what only a plan
    tells. Ctrl-C does not stop the job."""
    try:
        with screen.status("planning; Ctrl-C leaves the job in the queue"):
            job = _planned(client, job)
    finally:
        screen.print(job_view.submitted(job))
    return follow(client, job["id"], screen, is_rehearsed)


def _planned(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """A new job once it has its plan, at the latest after `PLAN_PATIENCE_S`: other jobs may be planned before it, and
    it may get no plan."""
    deadline, answered = time.monotonic() + PLAN_PATIENCE_S, {name: job[name] for name in ("notes", "place")}
    while job["state"] in (JobState.SUBMITTED, JobState.PLANNING) and time.monotonic() < deadline and not job["hold"]:
        time.sleep(POLL_S)
        job = client.job(job["id"]) | answered
    return job


def events(client: Client, job_id: int, following: bool) -> Iterator[dict[str, Any]]:
    """Yield the events (lines of metrics.jsonl) of a job; with `following` also new ones, until it is over. Where no
    daemon answers, the events are read from the run folder. At the end stderr says how many lines could not be read.
    Raises UserError `daemon-ended` or `daemon-silent` when the daemon ends or hangs on the way."""
    broken: list[int] = []
    try:
        lines = 0
        for piece in _pieces(client, job_id, following):
            broken += (lines + number for number in piece.broken)
            lines += piece.lines
            yield from piece.events
    finally:
        if broken:
            say(_left_out(broken), err=True)


def _pieces(client: Client, job_id: int, following: bool) -> Iterator[Piece]:
    position, last = 0, not following
    while True:
        try:
            last = last or client.job(job_id)["state"] in FINAL  # asked before reading, so that none is missed
            piece = client.events(job_id, position)
        except UserError as error:
            if position and error.code == "daemon-not-running":
                raise left_alone(job_id) from None
            if position:  # the run folder would repeat the events that came before
                raise
            yield _without_daemon(client, job_id, error, following).all_metrics()
            if following:
                raise
            return
        yield piece
        if piece.position != position:  # events come piece by piece
            position = piece.position
        elif last:
            return
        else:
            time.sleep(POLL_S)


def _left_out(broken: list[int]) -> str:
    """A sentence on the lines of a job's events that could not be read."""
    count, first = len(broken), broken[0]
    where = f"is left out: line {first}" if count == 1 else f"are left out; the first is line {first}"
    return f"{counted(count, 'line')} of the job's metrics.jsonl could not be read and {where}."


def log(client: Client, job_id: int, following: bool) -> Iterator[str]:
    """Yield the log of a job in parts; with `following` also what is appended, until the job is over. Where no daemon
    answers, it is read from the run folder. Raises UserError `daemon-ended` when the daemon ends before the job is
    over."""
    try:
        client.job(job_id)
    except UserError as error:
        yield from _lines(_without_daemon(client, job_id, error, following).log)
        if following:
            raise
        return
    try:
        yield from client.logs(job_id, following)
        over = not following or client.job(job_id)["state"] in FINAL
    except UserError as error:
        if error.code != "daemon-not-running":
            raise
        over = False
    if not over:
        raise left_alone(job_id)


def _without_daemon(client: Client, job_id: int, error: UserError, following: bool) -> RunFolder:
    """The run folder of a job whose daemon does not answer; unless `following`, stderr says where it is. Raises `error`
    where it is about something else, where the daemon is another machine's, or where there is no such folder."""
    run = RunFolder(client.paths.run_folder(job_id))
    if error.code not in ("daemon-not-running", "daemon-silent") or client.remote is not None or not run.path.is_dir():
        raise error
    if not following:
        say(f"{error.what} This is from {run.path}.", err=True)
    return run


def _lines(file: Path) -> Iterator[str]:
    if file.exists():
        with file.open(encoding="utf-8", errors="replace") as text:
            yield from text


def left_alone(job_id: int) -> UserError:
    """The error to raise where the daemon ends while a command follows a job."""
    return UserError(
        f"The daemon has ended; job {job_id} goes on at its next start.",
        code="daemon-ended",
        hint=f"offmate up, then offmate logs -f {job_id}",
        exit_code=Exit.DAEMON_NOT_RUNNING,
    )


class News:
    """Prints what is new about a job, and remembers what it has printed."""

    def __init__(self, client: Client, screen: Console) -> None:
        self._client = client
        self._screen = screen
        self._state = ""
        self._plan: dict[str, Any] | None = None
        self._step = 0
        self._line_due = 0.0
        self._position = 0

    def tell(self, job: dict[str, Any]) -> None:
        """Print what is new in `job`, the job as the API describes it. The text on its end comes last."""
        over = job["state"] in FINAL
        if not over:
            self._tell_state(job)
        if job["plan"] is not None and job["plan"] != self._plan:
            if self._plan is not None and (why := why_replaced(self._plan, job["plan"])):
                self._screen.print(why)
            self._plan = job["plan"]
            answer = self._client.plan(job["id"])
            if answer is not None:
                self._screen.print(job_view.plan(answer))
        self._tell_scoring(job)
        self._tell_evaluations(job)
        self._tell_loss(job)
        if over:
            self._tell_state(job)

    def _tell_state(self, job: dict[str, Any]) -> None:
        if job["state"] != self._state:
            self._state = job["state"]
            self._screen.print(f"{job['standing']}  {job_view.reason(job)}".rstrip())

    def _tell_scoring(self, job: dict[str, Any]) -> None:
        if (text := job_view.scoring(job)) and time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + LINE_EVERY_S
            self._screen.print(text)

    def _tell_evaluations(self, job: dict[str, Any]) -> None:
        if job["progress"] is None:
            return
        for event in self._new_events(job["id"]):
            where = f"step {event.get('step')} of {job['progress']['total_steps']}"
            if event["event"] == "rehearsed":
                self._screen.print(f"tried before the first step: {event['tried']}")
            if event["event"] == "reference":
                took = "" if event.get("seconds") is None else f" in {format_seconds(event['seconds'])}"
                self._screen.print(f"reference: {counted(event['rows'], 'row')} scored{took}")
            if event["event"] == "eval":
                loss = event.get("eval_loss")
                told = f"eval loss {'not a number' if loss is None else f'{loss:.3f}'}"
                self._screen.print(", ".join((where, told, *pair_words(event, "eval_"))))
            if event["event"] == "sample":
                self._screen.print(f"{where}, sample: {event['prompt']} ⟦{event['text']}⟧")

    def _new_events(self, job_id: int) -> Iterator[dict[str, Any]]:
        while True:
            before = self._position
            piece = self._client.events(job_id, before)
            self._position = piece.position
            yield from piece.events
            if self._position == before:
                return

    def _tell_loss(self, job: dict[str, Any]) -> None:
        progress, over = job["progress"], job["state"] in FINAL
        if not progress or progress["loss"] is None or progress["step"] == self._step:
            return
        if over or time.monotonic() >= self._line_due:
            self._step = progress["step"]
            self._line_due = time.monotonic() + LINE_EVERY_S
            where = f"step {progress['step']} of {progress['total_steps']}"
            told = (f"loss {progress['loss']:.3f}", *pair_words(progress))
            remaining = (f"{job_view.remaining(job)} left",) if job_view.remaining(job) else ()
            self._screen.print(", ".join((where, *told, *remaining)))

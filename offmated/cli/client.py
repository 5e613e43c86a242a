"""Sends requests to the daemon over its Unix socket, or over TCP to another machine's. It imports little and fast,
because commands import it before they print anything."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import httpx

from offmated.cli.remote import Remote
from offmated.lock import lock_holder
from offmated.paths import Paths
from offmated.version import API, release
from planner.errors import Exit, UserError, check_linux
from planner.run.events import Piece
from planner.run.processes import Process

Json = dict[str, Any]


class Turn(TypedDict, total=False):
    """The conditions under which a job may start (priority, time, other jobs), as in
    `offmated.jobs.queue_turns.Turn`."""

    priority: int
    after: int
    begin_at: float
    label: str
    held: bool
    window: str


KEY_HEADER = "Idempotency-Key"
PATIENCE_S = 30.0
SUBMIT_PATIENCE_S = 90.0  # the daemon looks at the first records meanwhile; if asked again, it would look twice
CLEAN_PATIENCE_S = 3600.0  # a disk may take long to free many gigabytes
RETRY_S = 0.5
BUSY_PATIENCE_S = 120.0
"""The seconds for which requests to a busy daemon, and submissions without an answer, are sent again."""


class Client:
    """The client of one daemon's API. Every method raises UserError: `daemon-not-running` (exit 69) when no daemon is
    there, `daemon-silent` when one does not answer, otherwise the daemon's own error. A request that a busy daemon
    refused is sent again."""

    def __init__(self, paths: Paths, remote: Remote | None = None) -> None:
        """`remote`: the daemon of another machine; by default the one that the environment names, if any. Raises
        UserError `linux-only` for a daemon on this machine where it cannot be."""
        self.paths = paths
        self.remote = remote or Remote.from_environment()
        # No connection is used twice: the daemon may close one, after its patience or after an error of its own, just
        # when a request is sent, and that would look as if no daemon were there.
        limits = httpx.Limits(max_keepalive_connections=0)
        if self.remote is None:
            check_linux()
            self._where = f"socket {paths.api_socket}"
            transport = httpx.HTTPTransport(uds=str(paths.api_socket), limits=limits)
            url, headers = "http://offmated", {}
        else:
            self._where = self.remote.url
            transport = httpx.HTTPTransport(limits=limits)
            url, headers = self.remote.url, {"Authorization": f"Bearer {self.remote.token}"}
        # Answers come quickly from the daemon's database; only a log that is followed may be silent for hours.
        self._http = httpx.Client(transport=transport, base_url=url, headers=headers, timeout=PATIENCE_S)

    def health(self) -> Json:
        """The daemon's report on itself: `{"api", "version", "process", "state": "running"|"stopping", "state_folder",
        "children": {name: {"pid", "restarts"}}, …}`."""
        return self._object("GET", "/health")

    def running(self) -> bool:
        """Whether a daemon runs and answers."""
        return self.health_if_running() is not None

    def health_if_running(self) -> Json | None:
        """The daemon's report on itself, as `health()` returns it; None when no daemon runs."""
        try:
            return self.health()
        except UserError as error:
            if error.code != "daemon-not-running":
                raise
            return None

    def submit(
        self,
        yaml_text: str,
        folder: str,
        name: str = "job.yaml",
        turn: Turn | None = None,
        *,
        key: str | None = None,
        settings: Sequence[str] = (),
    ) -> Json:
        """Submit the job file with the text `yaml_text`. Relative paths in it are below `folder`; errors call the file
        `name`; `settings`, each "KEY=VALUE", override the file. Returns the job as `job()` does, with "notes" to the
        user. Submitting again under the same `key` returns the same job."""
        body = {"yaml": yaml_text, "folder": folder, "name": name, **(turn or {})}
        if settings:
            body["settings"] = list(settings)
        try:
            key = key or uuid.uuid4().hex
            answer: Json = self._send("POST", "/jobs", body, key=key, patience_s=SUBMIT_PATIENCE_S).json()
        except UnicodeEncodeError:
            raise UserError(
                "The name of the job's folder is not valid text.",
                numbers=(repr(folder),),
                code="bad-folder-name",
                hint="its bytes are not UTF-8: rename it",
                exit_code=Exit.USAGE,
            ) from None
        return answer

    def rerun(
        self,
        job_id: int,
        turn: Turn,
        epochs: float | None = None,
        max_steps: int | None = None,
        *,
        key: str | None = None,
    ) -> Json:
        """Submit job `job_id` again, as a new job. With `epochs` or `max_steps` the new job goes on from the first
        one's checkpoint to that total length. Returns the new job. Repeating the call with the same `key` returns the
        same job."""
        length, key = _given(epochs=epochs, max_steps=max_steps), key or uuid.uuid4().hex
        # A path of its own: an older daemon that knows no length would begin the job from the start.
        url, body = f"/jobs/{job_id}/{'longer' if length else 'rerun'}", {**turn, **length}
        answer: Json = self._send("POST", url, body, key=key, patience_s=SUBMIT_PATIENCE_S).json()
        return answer

    def page(self, *states: str, limit: int, label: str | None = None) -> Json:
        """The newest jobs in these states (none given: all), newest first, at most `limit`: {"jobs", "next",
        "total"}."""
        return self._list("/jobs", {"limit": limit, "state": list(states), **_given(label=label)})

    def ended(self, *states: str, limit: int, label: str | None = None) -> Json:
        """The jobs in these states that ended last, the last first, at most `limit`: {"jobs", "next", "total"}."""
        return self._list("/jobs", {"limit": limit, "order": "ended", "state": list(states), **_given(label=label)})

    def jobs(self, *states: str, label: str | None = None) -> Iterator[Json]:
        """Yield all jobs in these states (none given: all), the newest first. They are requested page by page."""
        return self._pages("/jobs", "before", {"state": list(states), **_given(label=label)})

    def queue(self, label: str | None = None) -> Iterator[Json]:
        """Yield the jobs that are not over, in the order of their places in the queue. They are requested page by
        page."""
        return self._pages("/queue", "place", _given(label=label))

    def queue_page(self, limit: int, label: str | None = None) -> Json:
        """The first `limit` jobs that are not over, in the order of the queue: {"jobs", "next", "total", …}."""
        return self._list("/queue", {"limit": limit, **_given(label=label)})

    def job(self, job_id: int) -> Json:
        """What the daemon says of one job: its row in the database, `reason`, `progress`, `plan`, `predicted` and
        `measured`. Raises UserError `no-such-job` (exit 4)."""
        return self._object("GET", f"/jobs/{job_id}")

    def cancel(self, job_id: int) -> Json:
        """Cancel a job. A running job ends soon, without waiting for a checkpoint. Raises UserError `job-ended` when it
        is over."""
        return self._object("POST", f"/jobs/{job_id}/cancel")

    def retry(
        self, job_id: int, *, allow_changed_data: bool = False, allow_changed_model: bool = False, **budgets: int
    ) -> Json:
        """Make the daemon try a failed or cancelled job again, from its last checkpoint if it has one. `budgets`:
        `gpu_budget` and `cpu_budget` in bytes, for another plan. `allow_changed_data`: use the data as they are now;
        `allow_changed_model`: use the base model as it is now. Raises UserError `not-to-retry` when the job neither
        failed nor was cancelled."""
        allowed = {"allow_changed_data": allow_changed_data, "allow_changed_model": allow_changed_model}
        changes: Json = {**budgets, **{name: True for name, is_allowed in allowed.items() if is_allowed}}
        answer: Json = self._send("POST", f"/jobs/{job_id}/retry", changes, patience_s=SUBMIT_PATIENCE_S).json()
        return answer

    def change(self, job_id: int, change: str) -> Json:
        """Hold, release, pause or resume a job; `change` is one of these four words. Raises UserError `job-ended` when
        the job is over, `job-begun` when it works already, `not-held` and `not-paused` where there is nothing to
        change."""
        return self._object("POST", f"/jobs/{job_id}/{change}")

    def change_machine(self, change: str) -> Json:
        """Pause or resume all jobs of the machine; `change` is "pause" or "resume". Returns {"paused"}."""
        return self._object("POST", f"/machine/{change}")

    def move(self, job_id: int, **where: str | int) -> Json:
        """Give a waiting job another place in the queue: `to` "first" or "last", `before` the number of another job, or
        a `priority`."""
        return self._object("POST", f"/jobs/{job_id}/move", where)

    def clean(self, **request: Any) -> Json:
        """Find, and with `remove` delete, the files of ended jobs that are not needed any more. Returns {"jobs":
        [{"id", "name", "state", "bytes"}], "bytes"}; see `offmated.jobs.clean`."""
        answer: Json = self._send("POST", "/clean", request, patience_s=CLEAN_PATIENCE_S).json()
        return answer

    def unknown_runs(self) -> list[str]:
        """The names of the run folders that no job in the database has."""
        folders: list[str] = self._object("GET", "/adopt")["folders"]
        return folders

    def adopt(self, folders: Sequence[str]) -> tuple[list[Json], list[UserError]]:
        """Make jobs of these run folders, or of all that no job has. Returns the jobs, and for each folder of which no
        job was made the error."""
        answer: Json = self._send("POST", "/adopt", {"folders": list(folders)}, patience_s=CLEAN_PATIENCE_S).json()
        return answer["jobs"], [UserError.from_json(error) for error in answer["left"]]

    def report(self, since: float) -> Json:
        """What has ended since `since` (seconds since 1970), what runs now and what comes next, in words: {"since",
        "title", "lines"}."""
        return self._list("/report", {"since": since})

    def plan(self, job_id: int) -> Json | None:
        """The job's plan.json without its chain (the model's sizes and times); None before there is a plan."""
        answer: Json | None = self._send("GET", f"/jobs/{job_id}/plan").json()
        return answer

    def page_url(self) -> str:
        """The address of the daemon's page for a browser, with the token in it. The daemon opens the port if it is not
        open."""
        if self.remote is not None:
            return f"{self.remote.url}/#{self.remote.token}"
        return str(self._object("POST", "/page")["url"])

    def plan_page(self, job_id: int) -> bytes:
        """The HTML page that shows a job's plan. Raises UserError `no-plan` before there is one."""
        return self._send("GET", f"/jobs/{job_id}/plan.html").content

    def events(self, job_id: int, position: int = 0) -> Piece:
        """Some events (lines of metrics.jsonl) of a job after `position`, and the position to ask from next time; it is
        the same when there are no more events."""
        return Piece(**self._send("GET", f"/jobs/{job_id}/events", params={"position": position}).json())

    def logs(self, job_id: int, follow: bool = False) -> Iterator[str]:
        """Yield the job's log in parts, as text. With `follow` it goes on with what is appended, until the job is over
        or the daemon ends."""
        timeout = httpx.Timeout(PATIENCE_S, read=None)
        try:
            with self._http.stream("GET", f"/jobs/{job_id}/logs", params={"follow": follow}, timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    raise _error(answer)
                yield from answer.iter_text()
        except httpx.TransportError as error:
            raise self._unanswered(error) from None

    def shutdown(self, wait: bool = True) -> None:
        """End the daemon. Running jobs save a checkpoint first and continue at the daemon's next start. With `wait`,
        return only when the daemon is gone, which takes a step and a checkpoint."""
        process = Process.parse(self._object("POST", "/shutdown")["process"])
        while wait and process.alive():
            time.sleep(0.05)

    def _list(self, url: str, params: dict[str, Any]) -> Json:
        answer: Json = self._send("GET", url, params=params).json()
        return answer

    def _pages(self, url: str, cursor: str, params: dict[str, Any]) -> Iterator[Json]:
        while True:
            page = self._list(url, params)
            yield from page["jobs"]
            if page["next"] is None:
                return
            params = params | {cursor: page["next"]}

    def _object(self, method: str, url: str, body: Json | None = None) -> Json:
        answer: Json = self._send(method, url, body).json()
        return answer

    def _send(
        self,
        method: str,
        url: str,
        body: Json | None = None,
        params: dict[str, Any] | None = None,
        key: str | None = None,
        patience_s: float | None = None,
    ) -> httpx.Response:
        """The answer to one request, waited for `patience_s` (by default `PATIENCE_S`). Where it is not known whether
        the daemon has handled a request, it is sent again only when that does no harm: when it only looks, and when it
        submits under a `key`."""
        headers = {KEY_HEADER: key} if key is not None else {}
        timeout = httpx.Timeout(PATIENCE_S, read=patience_s or PATIENCE_S)
        deadline = time.monotonic() + BUSY_PATIENCE_S
        taken: tuple[str, ...] = ()
        while True:
            pause_s = RETRY_S
            try:
                answer = self._http.request(method, url, json=body, params=params, headers=headers, timeout=timeout)
            except httpx.TransportError as error:
                if not (_not_heard(error) or _nobody_there(error)) and key is not None:
                    taken = (
                        "it is not known whether the job was taken: offmate status shows it once a daemon answers",
                    )
                harmless = _not_heard(error) or key is not None or (method == "GET" and not _silent(error))
                if not harmless or _nobody_there(error) or time.monotonic() > deadline:
                    raise self._unanswered(error, taken, timeout.read) from None
            else:
                if not answer.is_error:
                    return answer
                later = answer.headers.get("retry-after", "")
                if not later.isdigit() or time.monotonic() > deadline:
                    raise _error(answer)
                pause_s = float(later)
            time.sleep(pause_s * random.uniform(0.5, 1.5))  # or all refused clients would come back at once

    def _unanswered(
        self, error: httpx.TransportError, more: tuple[str, ...] = (), patience_s: float | None = None
    ) -> UserError:
        patience_s = patience_s if isinstance(error, httpx.ReadTimeout) and patience_s is not None else PATIENCE_S
        silent = f"no answer within {patience_s:g} s" if _silent(error) else ""
        if self.remote is not None:
            return self.remote.unanswered(silent or str(error), *more)
        if silent:
            return daemon_silent(self.paths, silent, *more)
        if _not_heard(error):
            return daemon_silent(self.paths, "too many clients wait for a connection", *more)
        return UserError(
            "The daemon is not running.",
            numbers=(f"{self._where}: {error}", *more),
            hint="offmate up",
            code="daemon-not-running",
            exit_code=Exit.DAEMON_NOT_RUNNING,
        )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _silent(error: httpx.TransportError) -> bool:
    return isinstance(error, httpx.TimeoutException)


def _not_heard(error: httpx.TransportError) -> bool:
    """Whether the connection failed because too many clients wait to be connected."""
    return isinstance(error, httpx.ConnectError) and isinstance(_root(error), BlockingIOError)


def _nobody_there(error: httpx.TransportError) -> bool:
    return isinstance(error, httpx.ConnectError) and not _not_heard(error)


def _root(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def other_version(paths: Paths) -> UserError | None:
    """The error to raise where the running daemon is of another version, so that its answers are not understood: it was
    running before an upgrade, or was started from elsewhere. None where it is of this version, or does not say."""
    try:
        health = Client(paths).health()
    except (UserError, ValueError):
        return None
    if health.get("api") == API:
        return None
    return UserError(
        "The daemon is of another version of offmate.",
        numbers=(
            f"the daemon is {health.get('version', 'older')}, its API {health.get('api', 1)}",
            f"this command is {release()}, its API {API}",
        ),
        hint="offmate down, then offmate up; jobs go on from a checkpoint",
        code="other-version",
    )


def daemon_silent(paths: Paths, *numbers: str) -> UserError:
    """The error to raise where a daemon runs but does not answer. `numbers`: further lines for its text."""
    holder = lock_holder(paths)
    who = f"process {holder.pid}, " if holder is not None else ""
    return UserError(
        "The daemon does not answer.",
        numbers=(f"{who}socket {paths.api_socket}", *numbers),
        hint=f"{paths.log} may say why; " + (f"kill {holder.pid}, then offmate up" if holder else "try again"),
        code="daemon-silent",
    )


def _error(answer: httpx.Response) -> UserError:
    """The UserError that the daemon's answer carries; a general one for other answers."""
    if answer.headers.get("content-type") == "application/json" and "what" in (fields := answer.json()):
        return UserError.from_json(fields)
    return UserError(
        "The daemon could not answer.",
        numbers=(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.reason_phrase}",),
        hint="see daemon.log in the state folder",
        code="daemon-error",
    )

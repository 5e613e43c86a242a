"""Defines the daemon's HTTP API. Errors are sent as the fields of `UserError` (`offmated/api/refusals.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi import Path as InPath
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from sqlalchemy.exc import SQLAlchemyError

from offmated.api import monitoring, plan_page
from offmated.api.bodies import Adoption, Again, AskedLonger, AskedTurn, Cleaning, Move, Submission
from offmated.api.limits import Limits
from offmated.api.page import add_page
from offmated.api.refusals import add_handlers
from offmated.api.report import report
from offmated.api.views import job_view
from offmated.jobs import listing, queue_changes
from offmated.jobs.adopt import adopt, unknown
from offmated.jobs.clean import clean
from offmated.jobs.job_keys import keys_of
from offmated.jobs.listing import Page, newest, one
from offmated.jobs.retry import retry
from offmated.jobs.states import FINAL, LARGEST_ID, JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import check, rerun, submit
from offmated.jobs.table import KEY_LENGTH
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.run.folder import RunFolder

Json = dict[str, Any]

PAGE, MOST_IN_A_PAGE = 100, 200
LOG_POLL_S = 0.2
LOG_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The functions and objects of the daemon that the API uses. `wake` tells the daemon that something changed.
    `shut_down` asks it to end. `closing` says whether it is about to end, so that answers must end, too. `health` gives
    the daemon's report on itself. `page` gives the address for a browser, and opens its port if it is not open.
    `window`: the hours, set for the whole machine, in which jobs that name none may have the GPU."""

    store: Store
    paths: Paths
    wake: Callable[[], None]
    shut_down: Callable[[], None]
    closing: Callable[[], bool]
    health: Callable[[], Json]
    page: Callable[[], str]
    window: str | None = None


async def _services(request: Request) -> Services:  # async: else each request, `health` too, would wait for a thread
    services: Services = request.app.state.services
    return services


Use = Annotated[Services, Depends(_services)]
JobId = Annotated[int, InPath(ge=1, le=LARGEST_ID)]
InAPage = Annotated[int, Query(ge=1, le=MOST_IN_A_PAGE)]
Number = Annotated[int, Query(ge=1, le=LARGEST_ID)]
Tail = Annotated[int | None, Query(ge=0, le=2**20)]
Label = Annotated[str | None, Query(max_length=KEY_LENGTH)]
Key = Annotated[str | None, Header(min_length=1, max_length=KEY_LENGTH)]


def make_app(services: Services) -> FastAPI:
    """Make the FastAPI application that serves the daemon's API."""
    app = FastAPI(title="offmate", docs_url=None, redoc_url=None)
    app.state.services = services
    app.add_middleware(Limits)
    add_handlers(app)
    app.get("/health")(health)
    app.get("/healthz", response_class=PlainTextResponse)(healthz)
    app.get("/metrics", response_class=PlainTextResponse)(metrics)
    app.post("/jobs", status_code=201)(submit_job)
    app.post("/jobs/check")(check_job)
    app.get("/jobs")(list_jobs)
    app.get("/queue")(list_queue)
    app.get("/jobs/{job_id}")(show_job)
    app.get("/jobs/{job_id}/keys")(show_keys)
    app.get("/jobs/{job_id}/plan")(show_plan)
    app.get("/jobs/{job_id}/plan.html", response_class=HTMLResponse)(show_plan_page)
    app.get("/jobs/{job_id}/logs", response_class=PlainTextResponse)(show_log)
    app.get("/jobs/{job_id}/events")(show_events)
    app.post("/jobs/{job_id}/cancel")(cancel_job)
    app.post("/jobs/{job_id}/retry")(retry_job)
    app.post("/jobs/{job_id}/rerun", status_code=201)(rerun_job)
    app.post("/jobs/{job_id}/longer", status_code=201)(longer_job)
    app.post("/jobs/{job_id}/move")(move_job)
    app.post("/jobs/{job_id}/{change}")(change_job)
    app.post("/machine/{change}")(change_machine)
    app.get("/report")(show_report)
    app.post("/clean")(clean_up)
    app.get("/adopt")(show_unknown)
    app.post("/adopt", status_code=201)(adopt_runs)
    app.post("/page")(open_page)
    app.post("/shutdown", status_code=202)(shut_down)
    add_page(app)
    return app


async def health(use: Use) -> Json:
    """Get the daemon's report on itself. It takes no thread, so it is answered also when all threads wait for the
    database."""
    return use.health()


async def healthz() -> PlainTextResponse:
    """Answer that the daemon runs. This needs no token."""
    return PlainTextResponse("ok\n")


def metrics(use: Use) -> PlainTextResponse:
    """Get figures of the daemon and of the jobs that work now, in Prometheus's text format."""
    return PlainTextResponse(monitoring.figures(use.store, use.health()), media_type="text/plain; version=0.0.4")


def submit_job(body: Submission, use: Use, idempotency_key: Key = None) -> Json:
    """Submit a job. The answer is the new job, or 422 with the error's fields when it cannot be run as written. If a
    job was accepted under the same key before, for example when the first answer was lost, the answer is that job."""
    row, _ = submit(
        use.store,
        use.paths,
        body.yaml,
        body.base(),
        body.name,
        idempotency_key,
        body.turn(),
        use.window,
        settings=body.settings,
    )
    use.wake()
    return show_job(row.id, use)


def check_job(body: Submission, use: Use) -> Json:
    """Check a job as `POST /jobs` does, and take nothing in: {"name", "notes"}, or 422 with the error's fields."""
    name, notes = check(
        use.store,
        use.paths,
        body.yaml,
        body.base(),
        body.name,
        body.turn(),
        use.window,
        settings=body.settings,
    )
    return {"name": name, "notes": notes}


def list_jobs(
    use: Use,
    limit: InAPage = PAGE,
    before: Number | None = None,
    state: Annotated[list[JobState] | None, Query(max_length=len(JobState))] = None,
    label: Label = None,
    order: Literal["id", "ended"] = "id",
) -> Json:
    """Jobs in these states (none given: all) and with this label, the newest first: {"jobs", "next", "total"}. `next`
    is the `before` of the page after this one; null when there is none. With `order=ended` the jobs that ended last
    come first, and there is only one page."""
    by_end = order == "ended"
    return _page(newest(use.store, state or (), before=before, label=label, limit=limit, by_end=by_end))


def list_queue(use: Use, limit: InAPage = PAGE, place: Number = 1, label: Label = None) -> Json:
    """The jobs that are not over, in the order of the queue, from number `place` in it on, in the form of `GET /jobs`;
    "paused" says whether the whole machine is paused."""
    page = listing.queue(use.store, place=place, label=label, limit=limit)
    return _page(page) | {"paused": page.paused}


def _page(page: Page) -> Json:
    return {"jobs": [job_view(job) for job in page.jobs], "next": page.following, "total": page.total}


def show_job(job_id: JobId, use: Use) -> Json:
    """All that the daemon knows about one job, as `offmate show ID --json` prints it, but for its plan."""
    return job_view(one(use.store, job_id))


def show_keys(job_id: JobId, use: Use) -> Json:
    """The job's keys as offmate understands them, with all defaults: {"keys", "changed"}. `changed` names those whose
    values are not the defaults."""
    keys, changed = keys_of(RunFolder(Path(use.store.job(job_id).run_dir)))
    return {"keys": keys, "changed": changed}


def show_plan(job_id: JobId, use: Use) -> Json | None:
    """The job's plan.json without its chain (the model's sizes and times); null before there is a plan."""
    document = RunFolder(Path(use.store.job(job_id).run_dir)).read_plan()
    return document and {name: value for name, value in document.items() if name != "chain"}


def show_plan_page(job_id: JobId, use: Use) -> HTMLResponse:
    """The HTML page that shows a job's plan; the error `no-plan` before there is one."""
    row = use.store.job(job_id)
    return HTMLResponse(plan_page.draw(RunFolder(Path(row.run_dir)), job_id, row.name), headers=plan_page.HEADERS)


def cancel_job(job_id: JobId, use: Use) -> Json:
    """Cancel a job. A running job is told to stop, and ends soon after."""
    before = use.store.job(job_id).state
    after = use.store.stop(job_id, StopReason.CANCEL)
    if after in FINAL and (before in FINAL or after is not JobState.CANCELLED):
        raise UserError(
            f"Job {job_id} is over: {after}.", hint=f"offmate show {job_id}", code="job-ended", exit_code=Exit.USAGE
        )
    use.wake()
    return show_job(job_id, use)


def retry_job(job_id: JobId, use: Use, changes: Again | None = None) -> Json:
    """Try a failed or cancelled job again, from its last checkpoint if it has one."""
    again = changes or Again()
    retry(
        use.store,
        job_id,
        gpu_budget=again.gpu_budget,
        cpu_budget=again.cpu_budget,
        allow_changed_data=again.allow_changed_data,
        allow_changed_model=again.allow_changed_model,
    )
    use.wake()
    return show_job(job_id, use)


def rerun_job(job_id: JobId, body: AskedTurn, use: Use, idempotency_key: Key = None) -> Json:
    """Submit a job again, as a new job; the answer is that of `POST /jobs`."""
    row, _ = rerun(use.store, use.paths, job_id, idempotency_key, body.turn(), use.window)
    use.wake()
    return show_job(row.id, use)


def longer_job(job_id: JobId, body: AskedLonger, use: Use, idempotency_key: Key = None) -> Json:
    """Continue a done job, as a new job, to a greater number of epochs or steps; the answer is that of `POST /jobs`."""
    row, _ = rerun(use.store, use.paths, job_id, idempotency_key, body.turn(), use.window, body.length())
    use.wake()
    return show_job(row.id, use)


def move_job(job_id: JobId, body: Move, use: Use) -> Json:
    """Give a waiting job another place in the queue."""
    if body.before is not None:
        queue_changes.move_before(use.store, job_id, body.before)
    elif body.priority is not None:
        queue_changes.set_priority(use.store, job_id, body.priority)
    else:
        (queue_changes.move_first if body.to == "first" else queue_changes.move_last)(use.store, job_id)
    return show_job(job_id, use)


def change_job(job_id: JobId, change: Literal["hold", "release", "pause", "resume"], use: Use) -> Json:
    """Hold, release, pause or resume a job."""
    {
        "hold": queue_changes.hold,
        "release": queue_changes.release,
        "pause": queue_changes.pause,
        "resume": queue_changes.resume,
    }[change](use.store, job_id)
    use.wake()
    return show_job(job_id, use)


def change_machine(change: Literal["pause", "resume"], use: Use) -> Json:
    """Pause or resume the whole machine: {"paused"}. At a pause, running jobs save a checkpoint and end soon after."""
    (queue_changes.pause_all if change == "pause" else queue_changes.resume_all)(use.store)
    use.wake()
    return {"paused": change == "pause"}


def show_events(job_id: JobId, use: Use, position: Annotated[int, Query(ge=0, lt=2**63)] = 0) -> Json:
    """Some events (lines of metrics.jsonl) after `position`, and the position to ask from next time; where there are no
    more, no events and the same position. `lines`: how many lines of metrics.jsonl were read; `broken`: which of these,
    counted from 1, are not events."""
    piece = RunFolder(Path(use.store.job(job_id).run_dir)).metrics_after(position)
    return {"events": piece.events, "position": piece.position, "lines": piece.lines, "broken": piece.broken}


def show_log(job_id: JobId, use: Use, follow: bool = False, tail: Tail = None) -> StreamingResponse:
    """The job's log as text; with `tail`, only the whole lines among its last `tail` bytes; with `follow`, also what is
    appended until the job is over."""
    run = RunFolder(Path(use.store.job(job_id).run_dir))
    start = 0 if tail is None else _start_of_tail(run.log, tail)
    return StreamingResponse(_log(run, job_id, use, follow, start), media_type="text/plain; charset=utf-8")


def _start_of_tail(path: Path, tail: int) -> int:
    size = path.stat().st_size if path.exists() else 0
    if size <= tail:
        return 0
    start = size - tail - 1  # a line may begin just there
    return start + _read(path, start).find(b"\n") + 1


async def _log(run: RunFolder, job_id: int, use: Services, follow: bool, position: int) -> AsyncIterator[bytes]:
    while True:
        # Asked before reading, so that everything written before the job ended is read.
        last = not follow or use.closing() or await asyncio.to_thread(_is_over, use, job_id)
        while piece := await asyncio.to_thread(_read, run.log, position):
            position += len(piece)
            yield piece
        if last:
            return
        await asyncio.sleep(LOG_POLL_S)


def _is_over(use: Services, job_id: int) -> bool:
    """Whether the job is over; False where the database is busy, as a log must not end because of that."""
    try:
        return use.store.job(job_id).state in FINAL
    except (SQLAlchemyError, TimeoutError):
        return False


def _read(path: Path, position: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(position)
        return file.read(LOG_PIECE_BYTES)


def show_report(use: Use, since: Annotated[float, Query(ge=0, le=2**40)] = 0.0) -> Json:
    """What has ended since `since` (seconds since 1970), what runs now and what comes next, in words: {"since",
    "title", "lines"}."""
    return report(use.store, since)


def clean_up(body: Cleaning, use: Use) -> Json:
    """Remove the files that ended jobs do not need any more, or only say how many bytes they have: {"jobs",
    "bytes"}."""
    freed = clean(use.store, body.jobs, unfinished=body.unfinished, older_s=body.older_s, remove=body.remove)
    return {"jobs": [asdict(job) for job in freed], "bytes": sum(job.bytes for job in freed)}


def show_unknown(use: Use) -> Json:
    """{"folders"}: the run folders that no job in the database has, for example after the database was lost."""
    return {"folders": [str(folder) for folder in unknown(use.store, use.paths)]}


def adopt_runs(body: Adoption, use: Use) -> Json:
    """Make jobs of the named run folders, or of all that no job has: {"jobs", "left"}. `left` has the errors of the
    folders of which no job was made."""
    adopted = adopt(use.store, use.paths, body.folders)
    use.wake()
    return {
        "jobs": [show_job(row.id, use) for row in adopted.rows],
        "left": [error.to_json() for error in adopted.left],
    }


def open_page(use: Use) -> Json:
    """{"url"}: the page's address for a browser, with the token that it needs. Opens the port if it was not open."""
    return {"url": use.page()}


async def shut_down(use: Use) -> Json:
    """End the daemon; running jobs save a checkpoint first. The answer comes at once, and names the process to wait
    for."""
    use.shut_down()
    return use.health()

"""Lists of jobs over the API, of a database with two thousand of them: pages of bounded size, by as many queries as for
few, in as little memory."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import event, insert, text

from offmated.cli.client import Client
from offmated.cli.job_list import FIRST, LAST, listing, view
from offmated.jobs import figures
from offmated.jobs.states import FINAL, JobState
from offmated.jobs.table import JobRow
from planner.errors import UserError
from planner.run.processes import Process
from tests.offmated.cli.test_views import printed
from tests.support.served import JOB, Served, served

MANY, FEW = 2_000, 20
KEPT = 64  # jobs whose figures stay in memory
WITH_EVENTS = 150  # jobs that have figures


@pytest.fixture(scope="module")
def few() -> Iterator[Served]:
    with served() as built:
        fill(built, FEW)
        yield built


@pytest.fixture(scope="module")
def many() -> Iterator[Served]:
    with served() as built:
        fill(built, MANY)
        yield built


def fill(served: Served, count: int) -> None:
    """Half of the jobs are over, a job is planned and one runs, and the rest waits with one of three priorities."""
    over, waiting = sorted(FINAL), (JobState.SUBMITTED, JobState.WAITING)
    rows = [
        {
            "id": number,
            "name": f"job {number}",
            "created_at": float(number),
            "run_dir": f"/nowhere/{number}",
            "state": over[number % 3] if number <= count // 2 else waiting[number % 2],
            "priority": number % 3,
            "position": number,
            "attempts": 0,
            "crashes": 0,
            "history": [],
            "notes": [],
        }
        for number in range(1, count + 1)
    ]
    for row, state in zip(rows[-2:], (JobState.PLANNING, JobState.RUNNING), strict=True):
        row |= {"state": state, "owner": str(Process.current())}
    for row in rows[:WITH_EVENTS]:
        row["run_dir"] = str(served.paths.runs / str(row["id"]))
    with served.store.engine.begin() as connection:
        connection.execute(insert(JobRow), rows)


@contextmanager
def counted(served: Served) -> Iterator[list[str]]:
    """The statements that the database is sent."""
    said: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        said.append(statement)

    event.listen(served.store.engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(served.store.engine, "before_cursor_execute", note)


def test_what_people_ask_takes_as_many_queries_of_many_jobs_as_of_few(few: Served, many: Served) -> None:
    def queries(served: Served) -> list[int]:
        client, found = served.client, []
        last = client.page(limit=1)["jobs"][0]["id"]
        asks = (
            lambda: client.page(limit=FEW),
            lambda: client.page(*FINAL, limit=FEW),
            lambda: client.queue_page(FEW),
            lambda: client.job(last),
            lambda: listing(client, False),
            lambda: client.submit(JOB, str(served.folder)),
        )
        for ask in asks:
            with counted(served) as said:
                ask()
            found.append(len(said))
        client.cancel(client.page(limit=1)["jobs"][0]["id"])
        return found

    assert queries(many) == queries(few)
    assert max(queries(few)) <= 15, "a list of eight, for the queue, and one of seven, their beginning included"


def test_all_jobs_come_page_by_page_each_once(many: Served) -> None:
    numbers = [job["id"] for job in many.client.jobs()]
    assert numbers == list(range(len(numbers), 0, -1))
    assert {job["state"] for job in many.client.jobs("failed")} == {"failed"}
    waiting = list(many.client.queue())
    assert [job["place"] for job in waiting] == list(range(1, MANY // 2 + 1))
    order = [(-job["priority"], job["id"]) for job in waiting[2:]]
    assert order == sorted(order)
    assert {job["state"] for job in waiting[:2]} == {"running", "planning"}


def test_a_place_in_a_long_queue_is_told_with_the_reason(many: Served) -> None:
    queue = [job for job in many.client.queue() if job["state"] == "waiting"]
    assert queue[0]["reason"] == f"waits for job {MANY}"
    assert queue[99]["reason"] == "waits for the GPU, 100 before it"
    assert many.client.job(queue[99]["id"])["reason"] == queue[99]["reason"]


@pytest.mark.parametrize("params", ["limit=0", "limit=201", "limit=x", "state=odd", "before=0", f"before={10**30}"])
def test_a_page_that_is_none_is_refused(few: Served, params: str) -> None:
    with pytest.raises(UserError) as caught:
        few.client._list("/jobs", dict([params.split("=")]))
    assert caught.value.code == "bad-request"


def test_status_lists_the_last_that_are_over_and_the_head_of_the_queue(many: Served) -> None:
    found = listing(many.client, False)
    assert len(found.jobs) == LAST + FIRST
    states = [job["state"] for job in found.jobs]
    assert set(states[:LAST]) <= FINAL and not set(states[LAST:]) & FINAL
    over = many.client.page(*FINAL, limit=1)["jobs"][0]["id"]
    assert found.jobs[LAST - 1]["id"] == over
    assert [job["place"] for job in found.jobs[LAST:]] == list(range(1, FIRST + 1))
    last = printed(view(found))[-1]
    assert last == (
        f"Not listed: {found.before} older ones and {MANY // 2 - FIRST} that wait behind these.  offmate status --all"
    )
    everything = listing(many.client, True)
    assert (len(everything.jobs), everything.before, everything.behind) == (many.client.page(limit=1)["total"], 0, 0)


@pytest.fixture
def garbage_is_looked_for_as_in_the_daemon() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("garbage_is_looked_for_as_in_the_daemon")
def test_lists_take_no_more_memory_for_many_jobs(many: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while a page is made nor afterwards, though there is much to be read of each job."""
    steps = "".join(json.dumps({"event": "step", "step": n, "loss": 1.0, "step_s": 0.5}) + "\n" for n in range(400))
    for number in range(1, WITH_EVENTS + 1):
        folder = many.paths.run_folder(number)
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text('{"event": "start", "step": 0, "total_steps": 9999}\n' + steps)
    monkeypatch.setattr(figures, "KEPT_FILES", KEPT)
    client = many.client
    client.page(limit=200)
    figures._steps._found.clear()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        seen = sum(job["progress"] is not None for job in client._pages("/jobs", "before", {"before": 2 * WITH_EVENTS}))
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == WITH_EVENTS
    assert len(figures._steps._found) <= KEPT
    assert after - before < 1.5 * 2**20
    assert peak - before < 3 * 2**20, "the files have 3.5 MiB"


def test_a_job_of_a_damaged_row_is_listed_with_the_others(few: Served) -> None:
    damaged = {
        "history": ("", "no json", "[1]", '[{"number": 1}]', "{}", '"x"'),
        "error": ("", "[]", '{"what": 1}', "7"),
        "result": ("", "[]", "no"),
        "notes": ("", "{}", "no"),
        "owner": ("", "1:2", "x:y:z", "1:2:3:4"),
    }
    total = few.client.page(limit=1)["total"]
    number = few.client.page("running", limit=1)["jobs"][0]["id"]
    for column, values in damaged.items():
        for value in values:
            with few.store.engine.begin() as connection:
                (kept,) = connection.execute(text(f"SELECT {column} FROM jobs WHERE id = {number}")).one()
                connection.execute(text(f"UPDATE jobs SET {column} = :value WHERE id = {number}"), {"value": value})
            assert len(list(few.client.jobs())) == total, (column, value)
            assert few.client.job(number)["id"] == number
            assert listing(Client(few.paths), False).jobs
            with few.store.engine.begin() as connection:
                connection.execute(text(f"UPDATE jobs SET {column} = :value WHERE id = {number}"), {"value": kept})

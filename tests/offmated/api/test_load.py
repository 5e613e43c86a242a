"""Many clients at once, and a database that others use: nothing lost, nothing doubled, nothing ends in a 500. The
real server and database; clients are threads with a connection each. Some tests take seconds: a hundred jobs are
written to a disk, each flushed."""

from __future__ import annotations

import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from offmated.api import limits
from offmated.cli import client as client_module
from offmated.cli.client import KEY_HEADER, Client, Turn
from offmated.jobs import database, looking, submission
from offmated.jobs.database import choose_journal
from planner.errors import UserError
from tests.support.cutting_proxy import cutting
from tests.support.daemons import until
from tests.support.desks import short_paths
from tests.support.served import JOB, Served, served

CLIENTS, EACH = 20, 5


@pytest.fixture
def own() -> Iterator[Served]:
    with served() as built:
        yield built


@pytest.fixture
def hasty() -> Iterator[Served]:
    """One that does not wait long for its database."""
    with served(patience_s=0.2) as built:
        yield built


def raw(served: Served) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(served.paths.api_socket))
    return httpx.Client(transport=transport, base_url="http://offmated", timeout=120)


@contextmanager
def locked(served: Served) -> Iterator[None]:
    """While another program has the database for itself."""
    with closing(sqlite3.connect(served.paths.database, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("sound_log", [False, True])
def test_of_100_submissions_by_20_clients_none_is_lost_or_doubled(
    own: Served, monkeypatch: pytest.MonkeyPatch, sound_log: bool
) -> None:
    """The jobs are not looked at beforehand: that takes a process each, and most of the time."""
    monkeypatch.setattr(submission, "look_at", lambda run, folder: ())
    monkeypatch.setattr(database, "has_sound_log", lambda: sound_log)
    choose_journal(own.store.engine)
    own.client.submit(JOB + "run_name: first\n", str(own.folder))
    done = threading.Event()

    def hand_in(number: int) -> list[int]:
        client, taken = own.client, []
        for job in range(EACH):
            text, turn = f"{JOB}run_name: job-{number}-{job}\n", Turn(priority=(number + job) % 3)
            taken.append(client.submit(text, str(own.folder), turn=turn)["id"])
            if job == EACH - 1:
                client.cancel(taken[-1])
        return taken

    def look() -> int:
        client, looks = own.client, 0
        while not done.is_set():
            assert client.health()["state"] == "running"
            assert client.job(1)["name"] == "first"
            looks += 1
        return looks

    with ThreadPoolExecutor(CLIENTS + 2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        taken = list(pool.map(hand_in, range(CLIENTS)))
        done.set()
        assert all(looks.result() > 0 for looks in looking)
    rows = own.store.jobs()
    numbers = {row.name: row.id for row in rows[1:]}
    assert {f"job-{client}-{job}": taken[client][job] for client in range(CLIENTS) for job in range(EACH)} == numbers
    assert [row.id for row in rows] == list(range(1, CLIENTS * EACH + 2))
    assert all(earlier.created_at <= later.created_at for earlier, later in pairwise(rows))
    assert all(list(jobs) == sorted(jobs) for jobs in taken), "each client's in its order"
    assert [row.id for row in rows if row.state == "cancelled"] == sorted(jobs[-1] for jobs in taken)
    waiting = sorted((row for row in rows if row.state != "cancelled"), key=lambda row: (-row.priority, row.id))
    assert [job["id"] for job in own.client.queue(None)] == [row.id for row in waiting], "by priority, then by time"
    folders = {path.name for path in own.paths.runs.iterdir()}
    assert folders == {str(row.id) for row in rows}, "and no draft is left"


def test_a_locked_database_is_waited_for_by_daemon_and_client(hasty: Served) -> None:
    hasty.client.submit(JOB, str(hasty.folder))
    with ThreadPoolExecutor(2) as pool, raw(hasty) as http:
        with locked(hasty):
            submitting = pool.submit(hasty.client.submit, JOB + "run_name: patient\n", str(hasty.folder))
            looking = pool.submit(hasty.client.job, 1)
            asked = [
                http.post("/jobs", json={"yaml": JOB, "folder": str(hasty.folder)}),
                http.post("/jobs/1/cancel"),
                http.post("/jobs/1/retry"),
                *(http.get(f"/jobs{path}") for path in ("", "/1", "/1/events", "/1/logs")),
            ]
            assert http.get("/health").status_code == 200
            assert not submitting.done() and not looking.done()
        for answer in asked:
            assert (answer.status_code, answer.json()["code"]) == (503, "database-busy"), answer.url
            assert int(answer.headers["retry-after"]) > 0
        assert submitting.result()["name"] == "patient"
        assert looking.result()["state"] == "submitted"
    assert [row.name for row in hasty.store.jobs()] == [hasty.folder.name, "patient"]


def test_what_stays_busy_is_told_as_such(hasty: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BUSY_PATIENCE_S", 0.1)
    with locked(hasty), pytest.raises(UserError) as caught:
        hasty.client.submit(JOB, str(hasty.folder))
    assert str(caught.value).startswith("The database is busy.\n  ")
    assert str(caught.value).endswith("hint: try again in a moment   [database-busy]")


def test_who_only_looks_does_not_wait_for_those_who_write(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    own.client.submit(JOB, str(own.folder))
    monkeypatch.setattr(limits, "TURN_S", 0.1)
    beginnings = [own.connect() for _ in range(limits.WRITERS)]
    for connection in beginnings:
        connection.sendall(b"POST /jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
    with raw(own) as http:

        def refused() -> bool:
            return http.post("/jobs/1/cancel").status_code == 503

        until(refused, "all turns are taken", every_s=0.01)
        assert http.get("/jobs/1").status_code == 200
        assert http.post("/shutdown").status_code == 202, "what ends the daemon waits for nobody"
        for connection in beginnings:
            connection.close()
        until(lambda: http.post("/jobs", json={}).status_code == 422, "there are turns again")


def test_all_that_the_daemon_waits_for_is_less_than_a_client_waits() -> None:
    assert limits.TURN_S + 2 * database.PATIENCE_S < client_module.PATIENCE_S < client_module.BUSY_PATIENCE_S
    to_take_a_job_in = limits.TURN_S + looking.LOOK_S + 2 * database.PATIENCE_S
    assert to_take_a_job_in < client_module.SUBMIT_PATIENCE_S < client_module.BUSY_PATIENCE_S


def test_what_takes_the_daemon_longer_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, patience_s in (("", 0.02), ("SUBMIT_", 0.04), ("CLEAN_", 0.06), ("BUSY_", 0.0)):
        monkeypatch.setattr(client_module, f"{name}PATIENCE_S", patience_s)
    with short_paths() as paths, socket.socket(socket.AF_UNIX) as silent:
        paths.create()
        silent.bind(str(paths.api_socket))
        silent.listen(9)
        client = Client(paths)
        said = []
        for ask in (
            client.health,
            lambda: client.submit(JOB, "/"),
            lambda: client.rerun(1, {}),
            lambda: client.clean(),
            lambda: client.cancel(1),
        ):
            with pytest.raises(UserError, match="daemon-silent") as caught:
                ask()
            said += [number for number in caught.value.numbers if number.startswith("no answer")]
    assert said == [f"no answer within {patience_s} s" for patience_s in (0.02, 0.04, 0.04, 0.06, 0.02)]


def test_a_job_is_taken_in_once_under_its_key(own: Served) -> None:
    body = {"yaml": JOB + "gradient_checkpointing: true\n", "folder": str(own.folder)}
    headers = {KEY_HEADER: "mine"}
    with raw(own) as http, ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: http.post("/jobs", json=body, headers=headers), range(10)))
        assert {answer.status_code for answer in answers} == {201}
        assert {answer.json()["id"] for answer in answers} == {1}
        assert all(any("gradient_checkpointing" in note for note in answer.json()["notes"]) for answer in answers)
        assert http.post("/jobs", json=body, headers={KEY_HEADER: "other"}).json()["id"] == 2
        once_more = {KEY_HEADER: "once more"}
        again = [http.post("/jobs/1/rerun", json={}, headers=once_more) for _ in range(2)]
        assert [(answer.status_code, answer.json()["id"]) for answer in again] == [(201, 3)] * 2
        other = http.post("/jobs", json=body | {"yaml": JOB}, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "key-taken")
        assert http.post("/jobs", json=body, headers={KEY_HEADER: 65 * "x"}).status_code == 422
    assert len(own.store.jobs()) == 3


def test_a_submission_sent_twice_does_not_stand_in_its_own_way(own: Served) -> None:
    body = {"yaml": JOB + "output_dir: out\n", "folder": str(own.folder)}
    with raw(own) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/jobs", json=body, headers={KEY_HEADER: "mine"}), range(8)))
    assert [(answer.status_code, answer.json()["id"]) for answer in answers] == [(201, 1)] * 8


def test_of_submissions_at_once_to_one_place_one_is_taken(own: Served) -> None:
    body = {"yaml": JOB + "output_dir: out\n", "folder": str(own.folder)}
    with raw(own) as http, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/jobs", json=body), range(8)))
    assert sorted(answer.status_code for answer in answers) == [201] + 7 * [422]
    assert len(own.store.jobs()) == 1


def test_a_submission_whose_answer_is_lost_is_handed_in_again_and_taken_once(own: Served) -> None:
    before = replace(own.paths, runtime=own.folder)
    with cutting(before.api_socket, own.paths.api_socket, cut=3) as proxy:
        job = Client(before).submit(JOB, str(own.folder))
        assert (job["id"], len(own.store.jobs()), len(proxy.requests)) == (1, 1, 4)
        keys = {re.search(rb"idempotency-key: (\w+)", request.lower())[1] for request in proxy.requests}  # type: ignore[index]
        assert len(keys) == 1
        assert Client(before).submit(JOB, str(own.folder))["id"] == 2, "another submission is another job"


def test_what_may_have_been_done_is_not_done_twice(own: Served) -> None:
    own.client.submit(JOB, str(own.folder))
    before = replace(own.paths, runtime=own.folder)
    with cutting(before.api_socket, own.paths.api_socket, cut=1) as proxy:
        with pytest.raises(UserError, match="daemon-not-running"):
            Client(before).cancel(1)
        assert len(proxy.requests) == 1
    assert own.client.job(1)["state"] == "cancelled"


def test_a_submission_that_nobody_answers_is_not_called_lost(own: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BUSY_PATIENCE_S", 0.0)
    before = replace(own.paths, runtime=own.folder)
    with cutting(before.api_socket, own.paths.api_socket, cut=1), pytest.raises(UserError) as caught:
        Client(before).submit(JOB, str(own.folder))
    assert caught.value.numbers[-1].startswith("it is not known whether the job was taken: offmate status")


def test_a_daemon_with_a_crowd_before_its_door_is_not_called_away(
    tmp_path: Path, own: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "BUSY_PATIENCE_S", 0.1)
    before = replace(own.paths, runtime=own.folder)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(before.api_socket))
        listener.listen(0)
        first.connect(str(before.api_socket))
        with pytest.raises(UserError) as caught:
            Client(before).submit(JOB, str(own.folder))
        assert (caught.value.code, caught.value.numbers[-1]) == (
            "daemon-silent",
            "too many clients wait for a connection",
        )


def test_a_folder_whose_name_is_no_text_is_told(own: Served) -> None:
    with pytest.raises(UserError) as caught:
        own.client.submit(JOB, "/data/\udcff")
    assert caught.value.code == "bad-folder-name"

"""What the API answers when a disk is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from offmated.api.app import Services, make_app
from offmated.cli.client import _error
from offmated.jobs.migrate import upgrade
from offmated.jobs.store import Store
from offmated.paths import Paths
from tests.support.disks import no_room_beyond

JOB = "model: ./model\ndataset: text.jsonl\nrun_name: %s\n"


class Api:
    """The API of a store in a folder, in this process."""

    def __init__(self, home: Path) -> None:
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text('{"model_type": "llama"}')
        (home / "model" / "tokenizer.json").write_text("{}")
        (home / "text.jsonl").write_text('{"text": "one"}\n')
        self.home, self.paths = home, Paths.at(home / "state")
        self.paths.runs.mkdir(parents=True)
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)
        services = Services(
            store=self.store,
            paths=self.paths,
            wake=lambda: None,
            shut_down=lambda: None,
            closing=lambda: False,
            health=dict,
            page=str,
        )
        self.http = TestClient(make_app(services))

    def submit(self, name: str = "a") -> Any:
        return self.http.post("/jobs", json={"yaml": JOB % name, "folder": str(self.home)})


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


def test_a_job_for_which_there_is_no_room_is_not_taken_and_nothing_of_it_stays(api: Api) -> None:
    with no_room_beyond(10):
        answer = api.submit()
    assert answer.status_code == 507
    error = _error(answer)
    assert str(error).startswith("The disk has no room for what the daemon writes.\n  [Errno 27] File too large")
    assert (list(api.store.jobs()), list(api.paths.runs.iterdir())) == ([], [])
    assert api.submit().status_code == 201


def test_a_database_that_is_full_takes_no_job_and_leaves_no_folder(api: Api) -> None:
    event.listen(api.store.engine, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count = 1"))
    api.store.engine.dispose()
    taken = 0
    while (answer := api.submit("n" * 255)).status_code == 201:
        taken += 1
        assert taken < 1000
    assert answer.status_code == 507, answer.text
    assert "database or disk is full" in str(_error(answer))
    assert len(api.store.jobs()) == len(list(api.paths.runs.iterdir())) == taken


def test_whatever_else_is_asked_of_a_full_disk_is_refused_in_the_same_way(api: Api) -> None:
    number = api.submit().json()["id"]
    assert api.http.post(f"/jobs/{number}/cancel").status_code == 200
    with no_room_beyond(10):
        answer = api.http.post(f"/jobs/{number}/retry", json={"cpu_budget": 2**20})
    assert answer.status_code == 507
    assert _error(answer).code == "disk-full"
    assert api.http.get(f"/jobs/{number}").json()["state"] == "cancelled"
    assert api.http.post(f"/jobs/{number}/retry").json()["state"] == "submitted"

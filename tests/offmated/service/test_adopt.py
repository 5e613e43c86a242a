"""A real daemon whose database was lost beside its run folders."""

from __future__ import annotations

import json

import pytest

from planner.errors import UserError
from tests.offmated.service.test_daemon_hurt import offmate
from tests.support.daemons import HELD_AT, House, house


def lose_database(home: House) -> None:
    home.down()
    for file in home.paths.state.glob("offmate.db*"):
        file.unlink()


def test_a_lost_database_is_said_and_run_folders_are_jobs_again() -> None:
    with house() as home:
        done, begun = home.submit("first"), home.submit("held", steps=30)
        home.wait_for(done, "done")
        home.wait_until_held(begun)
        lose_database(home)
        said = offmate(home, "up").stdout
        assert "The database does not know the run folders 1, 2: offmate adopt makes them jobs again." in said
        home.daemon = None
        try:
            with pytest.raises(UserError) as caught:
                home.client.adopt(["../state"])
            assert caught.value.code == "not-a-run"
            found = {job["id"]: job for job in json.loads(offmate(home, "adopt", "--json").stdout)}
            assert {number: job["state"] for number, job in found.items()} == {done: "done", begun: "failed"}
            assert found[done]["output"] == f"{home.paths.run_folder(done)}/output"
            assert found[begun]["error"]["numbers"] == [f"its last checkpoint is of step {HELD_AT}"]
            assert offmate(home, "adopt").stdout == "Every run folder belongs to a job.\n"
            with pytest.raises(UserError) as caught:
                home.client.adopt(["1"])
            assert caught.value.code == "run-known"
            assert "trainer here" in offmate(home, "logs", str(done)).stdout
            assert offmate(home, "show", str(done)).returncode == 0
            home.client.retry(begun)
            home.release(begun)
            assert home.wait_for(begun, "done", "failed")["state"] == "done"
            assert home.resumed_from(begun)[-1] == HELD_AT
            assert home.submit("next") == begun + 1
        finally:
            assert offmate(home, "down").returncode == 0

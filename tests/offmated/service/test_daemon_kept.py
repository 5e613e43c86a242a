"""A daemon that comes to the state folder of an earlier version, killed in the midst of it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.daemons import House, until
from tests.support.kept import lay_out

RUNNING = 6


@pytest.mark.parametrize("version", ["0001-last", "0002", "0003-last"])
def test_the_queue_of_an_earlier_version_goes_on(version: str) -> None:
    home = Path(tempfile.mkdtemp(prefix="offmate-", dir="/tmp"))  # sockets have short paths
    built = House(home)
    try:
        lay_out(version, "killed", built.paths, home, this_boot=True)
        built.up()
        until(lambda: built.job(RUNNING)["attempts"] == 2, "the job that ran goes on")
        first, second = built.job(RUNNING)["history"]
        assert first["ending"] == "went down with the daemon or the machine"
        assert second["from_step"] == first["checkpoint_step"] > 0
        built.client.cancel(RUNNING)
        built.wait_for(RUNNING, "cancelled")
        assert [built.wait_for(number, "done", "failed")["state"] for number in (7, 8, 9)] == ["done"] * 3
        first = list(built.client.jobs())[:-6:-1]
        assert [job["state"] for job in first] == ["done", "failed", "failed", *["cancelled"] * 2]
        built.down()
    finally:
        if built.daemon is not None and built.daemon.poll() is None:
            built.daemon.kill()
            built.daemon.wait()
        shutil.rmtree(home)

"""A daemon whose disk gets full, of bytes or with the word "files" of files, while a job trains: a program, for a disk
of its own at /mnt, see `tests.support.disks`."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import signal
import sys
from pathlib import Path

from planner.errors import UserError
from tests.support.daemons import House, until

BALLAST = Path("/mnt/somebody's")
FILES = sys.argv[1:] == ["files"]


def fill() -> None:
    """Somebody's file, or files, take all there is."""
    if FILES:
        BALLAST.mkdir()
        with contextlib.suppress(OSError):
            for name in itertools.count():
                (BALLAST / str(name)).touch()
        return
    with BALLAST.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def submission_is_refused(house: House) -> None:
    try:
        house.submit()
    except UserError as error:
        assert error.code == "disk-full", error
    else:
        raise AssertionError("there was room")


def main() -> None:
    home = Path("/mnt/h")
    home.mkdir()
    house = House(home)
    house.up()
    try:
        number = house.submit("held", steps=30)
        house.wait_until_held(number)
        fill()
        submission_is_refused(house)
        assert house.job(number)["state"] == "running"
        if FILES:
            next(BALLAST.iterdir()).unlink()  # for the one that releases it
        house.release(number)
        until(lambda: not house.living_trainers(number), "the trainer has died of it")
        until(lambda: house.job(number)["state"] == "waiting", "it is not shown as running")
        if FILES:  # the database has room to say it
            assert re.match(r"waiting for room: \d+ files missing", house.job(number)["reason"])
        else:
            assert house.job(number)["reason"].startswith("its process has ended")
        submission_is_refused(house)
        assert house.client.page(limit=1)["total"] == 1
        assert house.client.health()["state"] == "running"
        shutil.rmtree(BALLAST) if FILES else BALLAST.unlink()
        job = house.wait_for(number, "done", "failed")
        assert job["state"] == "done", job
        assert job["progress"]["step"] == 30
        assert house.submit() == number + 1
        house.wait_for(number + 1, "done")
        house.down()
    finally:
        if house.daemon is not None and house.daemon.poll() is None:
            house.daemon.send_signal(signal.SIGKILL)
            house.daemon.wait()


if __name__ == "__main__":
    main()

"""Accidents that are no death of one process: each happens to a daemon with a job that runs and one that waits, which
are to be there once, done, with the models of undisturbed ones. `tests.support.crashes` prints them as a table."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.support.crashes import Trial, closed_window, kill_all, kill_broker, trial_house
from tests.support.daemons import PATIENCE_S, House, more_daemons
from tests.support.disks import run_on_small_disk
from tests.support.next_version import REVISION, install_in

CLOCK = """
import os, time
_now = time.time
def _set(now=_now):
    try:
        with open(os.environ["OFFMATE_TEST_CLOCK"]) as file:
            return now() + float(file.read() or 0)
    except OSError:
        return now()
time.time = _set
"""
"""A clock that can be set, for all processes of a house: by how much is in a file."""
LOCKED_S = 5.0
DAY_S = 86400
UPGRADE = "the daemon killed, and its database upgraded by the next version"


def torn_checkpoint(trial: Trial) -> None:
    """The trainer, and half of its newest checkpoint with it."""
    run = trial.run(trial.jobs["running"])
    (trainer,) = trial.own_processes()
    trainer.send(signal.SIGSTOP)  # nobody is to start again before its files are torn
    newest = max(run.checkpoints.glob("step-*"), key=lambda path: int(path.name[5:]))
    for file in newest.iterdir():
        os.truncate(file, file.stat().st_size // 2)
    trainer.kill()


def locked_database(trial: Trial) -> None:
    """Another program has the database for itself, and a job is handed in meanwhile."""
    with sqlite3.connect(trial.home.paths.database) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        submitting = threading.Thread(target=lambda: trial.submit("submitted meanwhile", "meanwhile"))
        submitting.start()
        trial.home.release(trial.jobs["running"])
        submitting.join(LOCKED_S)
        assert submitting.is_alive(), "the database was not locked"
        connection.rollback()
    connection.close()
    submitting.join(PATIENCE_S)


def deleted_broker_folder(trial: Trial) -> None:
    """The broker's folder, and then the broker."""
    shutil.rmtree(trial.home.paths.broker)
    kill_broker(trial)


def clock_set(by_s: int) -> Callable[[Trial], None]:
    """The clock is set by so much."""

    def happen(trial: Trial) -> None:
        (trial.home.home / "clock").write_text(str(by_s))

    return happen


def two_daemons(trial: Trial) -> None:
    """Three more daemons on the same folder, at once."""
    said = [daemon.communicate(timeout=PATIENCE_S)[1] for daemon in more_daemons(trial.home, 3)]
    assert all("[already-running]" in text for text in said), said


def upgrade(trial: Trial) -> None:
    """The daemon is killed, and the next version's comes to its state folder, whose database it upgrades."""
    home = trial.home
    kill_all(trial)
    install_in(home.home / "fakes")
    home.up()
    with closing(sqlite3.connect(home.paths.database)) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(REVISION,)]
        whole = connection.execute("SELECT last_ending FROM jobs WHERE id = ?", (trial.jobs["undisturbed"],))
        assert whole.fetchall() == [("the trainer is done",)]
    assert len(list(home.paths.backups.iterdir())) == 1


ACCIDENTS: dict[str, Callable[[Trial], None]] = {
    "the newest checkpoint torn in half": torn_checkpoint,
    f"the database locked for {LOCKED_S:.0f} s, a job handed in meanwhile": locked_database,
    "the broker's folder deleted, the broker killed": deleted_broker_folder,
    "the clock set a day ahead": clock_set(DAY_S),
    "the clock set a day back": clock_set(-DAY_S),
    "three more daemons started": two_daemons,
    UPGRADE: upgrade,
}


def happen(name: str, *, real: bool = False) -> str:
    """Have an accident happen while a job runs, one waits and one waits for its window; returns what became of the job
    that ran. Raises AssertionError with what did not hold."""
    with trial_house(real, before=_with_a_clock) as home:
        trial = Trial(home, real)
        window = trial.submit("waiting for its window", "windowed", window=closed_window())
        trial.wait(window, "waiting")
        running = trial.submit("running", "held")
        trial.wait_until_held(running)
        trial.submit("queued", "next")
        ACCIDENTS[name](trial)
        home.release(running)
        for state in ("running", "queued"):
            trial.wait(trial.jobs[state], "done")
        home.client.change(window, "release")
        for number in trial.jobs.values():
            trial.wait(number, "done")
        trial.check()
        return trial.told("running")


def _with_a_clock(home: House) -> None:
    (home.home / "fakes" / "sitecustomize.py").write_text(CLOCK)
    home.environment["OFFMATE_TEST_CLOCK"] = str(home.home / "clock")


def full_disk() -> str:
    """A disk that gets full while a job trains, see `tests.support.full_disk_house`."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "said"
        code = run_on_small_disk(16 * 2**20, [sys.executable, "-m", "tests.support.full_disk_house"], log)
        assert code == 0, log.read_text("utf-8", errors="replace")
    return "waits, and goes on when there is room"

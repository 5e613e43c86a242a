"""A database of this version with jobs in every state, brought to the next version, which has one more migration."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from offmated.jobs.migrate import upgrade
from offmated.jobs.retry import retry
from offmated.jobs.states import TAKEN_FROM, JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.paths import Paths
from planner.errors import UserError
from planner.run.processes import Process
from tests import ROOT
from tests.offmated.jobs.conftest import JOB
from tests.support.daemons import until
from tests.support.next_version import MADE_UP, REVISION, migrations_in

ME = Process.current()
STATES = ["done", "failed", "cancelled", "running", "waiting", "planning", "submitted"]
DONE, FAILED, CANCELLED, RUNNING, *_ = range(1, 1 + len(STATES))
ENDINGS = ["the trainer is done", None, "cancelled", "went down with the daemon or the machine", None, None, None]


@pytest.fixture
def full(store: Store, paths: Paths) -> Store:
    """The store, with a job in each state; the running one is in its second attempt."""

    def take(number: int, phase: JobState) -> Any:
        row = store.take(number, phase, ME)
        assert row is not None
        return row

    for _ in STATES:
        submit(store, paths, JOB, paths.state.parent)
    store.end(take(FAILED, JobState.PLANNING), 3)
    for number in (DONE, CANCELLED, RUNNING, 5):
        store.end(take(number, JobState.PLANNING), 0)
    store.end(take(DONE, JobState.RUNNING), 0)
    cancelled = take(CANCELLED, JobState.RUNNING)
    store.stop(CANCELLED, StopReason.CANCEL)
    store.end(cancelled, None)
    store.end(take(RUNNING, JobState.RUNNING), None, blameless=True)
    take(RUNNING, JobState.RUNNING)
    take(6, JobState.PLANNING)
    assert [row.state for row in store.jobs()] == STATES
    return store


def rows(file: Path, columns: str = "*") -> list[Any]:
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute(f"SELECT {columns} FROM jobs ORDER BY id").fetchall()


def revision(file: Path) -> str:
    with closing(sqlite3.connect(file)) as connection:
        (found,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return str(found)


def test_an_upgrade_fills_the_new_column_and_leaves_the_others_and_a_copy_as_they_were(
    full: Store, paths: Paths, tmp_path: Path
) -> None:
    before = rows(paths.database)
    upgrade(full.engine, paths, migrations_in(tmp_path / "next"))
    assert rows(paths.database) == [(*row, ending) for row, ending in zip(before, ENDINGS, strict=True)]
    (copy,) = paths.backups.iterdir()
    assert (rows(copy), revision(copy), revision(paths.database)) == (before, "initial", REVISION)


def test_what_came_after_an_upgrade_is_kept_by_the_next_start(full: Store, paths: Paths, tmp_path: Path) -> None:
    scripts = migrations_in(tmp_path / "next")
    upgrade(full.engine, paths, scripts)
    full.stop(RUNNING, StopReason.CANCEL)
    after = rows(paths.database)
    upgrade(full.engine, paths, scripts)
    assert rows(paths.database) == after
    assert len(list(paths.backups.iterdir())) == 1


def test_jobs_of_before_an_upgrade_go_on_to_their_end_or_are_tried_again(
    full: Store, paths: Paths, tmp_path: Path
) -> None:
    upgrade(full.engine, paths, migrations_in(tmp_path / "next"))
    for row in full.jobs(*TAKEN_FROM):
        assert full.end(row, None, blameless=True) is TAKEN_FROM[row.state]
    for number in (FAILED, CANCELLED):
        retry(full, number)
    for phase in TAKEN_FROM:
        while due := full.due(phase, 1):
            taken = full.take(due[0].id, phase, ME)
            assert taken is not None
            full.end(taken, 0)
    assert [row.state for row in full.jobs()] == ["done"] * len(STATES)
    assert [attempt["number"] for attempt in full.job(RUNNING).history] == [1, 2, 3]


STANDS_STILL = """
    import pathlib, time
    pathlib.Path({place!r}).touch()
    time.sleep(600)
"""


def test_an_upgrade_that_is_killed_in_the_midst_loses_nothing_and_is_done_by_the_next_start(
    full: Store, paths: Paths, tmp_path: Path
) -> None:
    before, there = rows(paths.database), tmp_path / "stands still"
    stuck = migrations_in(tmp_path / "stuck", MADE_UP.read_text() + STANDS_STILL.format(place=str(there)))
    code = (
        "import sys; from pathlib import Path; from offmated.jobs.database import open_engine\n"
        "from offmated.jobs.migrate import upgrade; from offmated.paths import Paths\n"
        "paths = Paths.at(Path(sys.argv[1]))\n"
        "upgrade(open_engine(f'sqlite:///{paths.database}'), paths, Path(sys.argv[2]))\n"
    )
    upgrading = subprocess.Popen([sys.executable, "-c", code, paths.state, stuck], cwd=ROOT)
    try:
        until(there.exists, "all its statements are done, and not committed")
    finally:
        upgrading.kill()
        upgrading.wait()
    assert (rows(paths.database), revision(paths.database)) == (before, "initial")
    assert [rows(copy) for copy in paths.backups.iterdir()] == [before]
    upgrade(full.engine, paths, migrations_in(tmp_path / "next"))
    assert rows(paths.database, "last_ending") == [(ending,) for ending in ENDINGS]


def test_a_database_of_the_next_version_is_refused_in_one_line_and_stays_as_it_is(
    full: Store, paths: Paths, tmp_path: Path
) -> None:
    upgrade(full.engine, paths, migrations_in(tmp_path / "next"))
    after = rows(paths.database)
    with pytest.raises(UserError) as caught:
        upgrade(full.engine, paths)
    assert (caught.value.code, caught.value.numbers) == (
        "database-too-new",
        (f"its revision is {REVISION}, this offmate knows initial",),
    )
    assert rows(paths.database) == after
    with full.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM jobs")).scalar_one() == len(STATES)

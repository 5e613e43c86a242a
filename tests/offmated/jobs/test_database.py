"""How SQLite is opened: its journal, and what waits for what. Real files, threads and connections."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from offmated.jobs import database
from offmated.jobs.database import choose_journal, has_sound_log, open_engine
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.errors import UserError

VERSIONS = {
    (3, 6, 23): False,
    (3, 7, 0): False,
    (3, 40, 1): False,
    (3, 44, 5): False,
    (3, 44, 6): True,
    (3, 44, 7): True,
    (3, 45, 3): False,
    (3, 50, 4): False,
    (3, 50, 7): True,
    (3, 51, 2): False,
    (3, 51, 3): True,
    (3, 53, 0): True,
    (4, 0, 0): True,
}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(state=tmp_path / "state", runtime=Path("/tmp/unused-by-these-tests"))
    paths.runs.mkdir(parents=True)
    return paths


@pytest.fixture
def store(paths: Paths) -> Iterator[Store]:
    built = Store(f"sqlite:///{paths.database}")
    upgrade(built.engine, paths)
    yield built
    built.engine.dispose()


def mode(paths: Paths) -> str:
    with closing(sqlite3.connect(paths.database)) as connection:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])


@contextmanager
def locked(paths: Paths, how: str = "IMMEDIATE") -> Iterator[None]:
    """While another program writes to the database."""
    with closing(sqlite3.connect(paths.database, isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")


def add(store: Store, paths: Paths) -> int:
    def folder(job_id: int) -> Path:
        path = paths.run_folder(job_id)
        path.mkdir()
        return path

    return store.add("job", folder).id


@pytest.mark.parametrize(("version", "sound"), VERSIONS.items())
def test_a_log_is_trusted_to_the_versions_that_do_not_lose_it(version: tuple[int, int, int], sound: bool) -> None:
    assert has_sound_log(version) is sound


def test_the_journal_is_the_one_that_can_be_trusted_and_the_log_says_why(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(database, "has_sound_log", lambda: True)
    choose_journal(store.engine)
    assert mode(paths) == "wal"
    assert "the database's journal is WAL" in caplog.text
    assert sorted(path.name for path in paths.state.iterdir() if path.name.startswith(".")) == []
    monkeypatch.setattr(database, "has_sound_log", lambda: False)
    add(store, paths)  # into the log
    store.engine.dispose()
    choose_journal(store.engine)
    assert mode(paths) == "delete"
    assert "the database's journal is DELETE: SQLite 3." in caplog.text
    assert len(store.jobs()) == 1


def test_a_disk_that_cannot_have_a_log_gets_none(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert database._log_trouble(paths.state) is None
    trouble = database._log_trouble(Path("/proc"))
    assert trouble
    monkeypatch.setattr(database, "has_sound_log", lambda: True)
    monkeypatch.setattr(database, "_log_trouble", lambda folder: trouble)
    choose_journal(store.engine)
    assert mode(paths) == "delete"
    assert f"the disk of {paths.database} cannot have a log: {trouble}" in caplog.text


def test_a_database_that_others_use_keeps_its_journal(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.1)
    monkeypatch.setattr(database, "has_sound_log", lambda: True)
    with locked(paths):
        choose_journal(store.engine)
    assert "the database keeps its journal: database is locked" in caplog.text
    assert mode(paths) == "delete"


@pytest.mark.parametrize("sound", [False, True])
def test_nothing_that_threads_and_processes_write_at_once_is_refused_or_lost(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    monkeypatch.setattr(database, "has_sound_log", lambda: sound)
    choose_journal(store.engine)
    others = [Store(store.url) for _ in range(2)]  # each a process of its own, as far as SQLite can tell
    done = threading.Event()

    def look() -> int:
        looks = 0
        while not done.is_set():
            looks += len(store.jobs()) >= 0
        return looks

    def work(number: int) -> None:
        for _ in range(5):
            written = add(store, paths)
            others[number % 2].stop(written, StopReason.CANCEL)

    with ThreadPoolExecutor(24) as pool:
        looking = [pool.submit(look) for _ in range(4)]
        try:
            list(pool.map(work, range(20)))
        finally:
            done.set()
        assert all(looks.result() > 0 for looks in looking)
    rows = store.jobs()
    assert [(row.id, row.state) for row in rows] == [(number, JobState.CANCELLED) for number in range(1, 101)]
    assert [row.created_at for row in rows] == sorted(row.created_at for row in rows), (
        "numbers are given in time's order"
    )
    for other in others:
        other.engine.dispose()


def test_a_write_waits_its_time_for_others_and_then_says_so(store: Store, paths: Paths) -> None:
    hasty = Store(store.url, patience_s=0.2)
    with locked(paths), ThreadPoolExecutor(4) as pool:
        results = [pool.submit(add, hasty, paths) for _ in range(4)]
        errors = [result.exception() for result in results]
    assert all(isinstance(error, (OperationalError, TimeoutError)) for error in errors)
    assert any(isinstance(error, OperationalError) for error in errors)
    assert (list(paths.runs.iterdir()), store.jobs()) == ([], []), "nothing was begun"
    assert add(hasty, paths) == 1
    hasty.engine.dispose()


def test_workers_wait_longer_for_a_write_than_for_a_look(paths: Paths, store: Store) -> None:
    patient = Store(store.url, patience_s=database.WORKERS_PATIENCE_S)
    number = add(store, paths)
    seen: list[int] = []
    with ThreadPoolExecutor(1) as pool, locked(paths):
        writing = pool.submit(patient.stop, number, StopReason.CANCEL)
        with pytest.raises(TimeoutError):
            writing.result(0.5)
        with patient.looking() as session:
            seen.append(session.connection().exec_driver_sql("PRAGMA busy_timeout").scalar_one())
    assert writing.result() is JobState.CANCELLED
    assert seen == [1000 * database.PATIENCE_S]
    patient.engine.dispose()


@pytest.mark.parametrize("file", ["/nonexistent/x.db", "/"])
def test_a_database_that_cannot_be_opened_is_a_persons_error(paths: Paths, file: str) -> None:
    with pytest.raises(UserError) as caught:
        upgrade(open_engine(f"sqlite:///{file}"), paths)
    assert (caught.value.code, caught.value.numbers) == (
        "database-unreachable",
        (f"sqlite:///{file}", "unable to open database file"),
    )

"""Jobs in a real SQLite database, made by the migrations."""

from __future__ import annotations

import itertools
import json
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from offmated.jobs import table
from offmated.jobs.database import PATIENCE_S, open_engine
from offmated.jobs.migrate import scripts_folder, upgrade
from offmated.jobs.queue_turns import Turn
from offmated.jobs.states import FINAL, NEXT, JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.cache import tables
from planner.errors import Exit, UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.tasks import cancelled
from tests.support.next_version import migrations_in

ME = Process.current()
HEAD = ScriptDirectory(str(scripts_folder())).get_current_head()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    paths = Paths(state=tmp_path / "state", runtime=Path("/tmp/unused-by-these-tests"))
    paths.runs.mkdir(parents=True)
    return paths


def add(store: Store, paths: Paths, name: str = "job", priority: int = 0) -> int:
    def folder(job_id: int) -> Path:
        path = paths.run_folder(job_id)
        path.mkdir()
        return path

    return store.add(name, folder, Turn(priority=priority)).id


def waiting(store: Store, paths: Paths) -> int:
    number = add(store, paths)
    row = store.take(number, JobState.PLANNING, ME)
    assert row is not None
    assert store.end(row, 0) is JobState.WAITING
    return number


def test_the_migrations_make_the_tables_the_code_declares(store: Store) -> None:
    with store.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        both: Any = [table.metadata, tables.metadata]  # Alembic takes a list, its annotation does not say so
        assert compare_metadata(context, both) == []


def test_an_upgrade_of_an_up_to_date_database_changes_and_copies_nothing(store: Store, paths: Paths) -> None:
    add(store, paths)
    upgrade(store.engine, paths)
    assert len(store.jobs()) == 1
    assert not paths.backups.exists()


def test_a_database_is_copied_before_an_upgrade(store: Store, paths: Paths, tmp_path: Path) -> None:
    add(store, paths, "before")
    upgrade(store.engine, paths, migrations_in(tmp_path / "next"))
    with store.engine.connect() as connection:
        assert connection.execute(text("SELECT name, last_ending FROM jobs")).all() == [("before", None)]
    (copy,) = paths.backups.glob(f"offmate-{HEAD}-*.db")
    with sqlite3.connect(copy) as old:
        assert old.execute("SELECT name FROM jobs").fetchall() == [("before",)]
        assert old.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]


def test_a_database_of_a_newer_offmate_is_refused(store: Store, paths: Paths) -> None:
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(UserError) as caught:
        upgrade(store.engine, paths)
    assert str(caught.value) == (
        "The database was made by a newer offmate.\n"
        f"  its revision is 9999, this offmate knows {HEAD}\n"
        f"  hint: install the newer offmate again, or go back to a copy in {paths.backups}   [database-too-new]"
    )


def test_a_failing_migration_leaves_the_database_as_it_was(store: Store, paths: Paths, tmp_path: Path) -> None:
    failing = migrations_in(
        tmp_path / "next",
        f"from alembic import op\nrevision, down_revision = '9999', '{HEAD}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE half (id INTEGER)')\n    op.execute('no such statement')\n",
    )
    with pytest.raises(Exception, match="no such statement"):
        upgrade(store.engine, paths, failing)
    with store.engine.connect() as connection:
        assert connection.execute(text("SELECT name FROM sqlite_master WHERE name = 'half'")).all() == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == HEAD


def test_a_transaction_takes_the_write_lock_at_its_start(store: Store, paths: Paths) -> None:
    other = sqlite3.connect(paths.database, timeout=0)
    with store.engine.begin(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    other.close()


@pytest.mark.parametrize("url", ["", "not a url", "sqllite:///x.db", "postgresql+nodriver://localhost/x"])
def test_a_wrong_database_url_is_a_persons_error(url: str) -> None:
    with pytest.raises(UserError) as caught:
        open_engine(url)
    assert (caught.value.code, caught.value.exit_code) == ("bad-database-url", Exit.USAGE)


def test_numbers_are_never_given_twice(store: Store, paths: Paths) -> None:
    first = add(store, paths)
    with store.engine.begin() as connection:
        connection.execute(text("DELETE FROM jobs"))
    assert add(store, paths) == first + 1


def test_a_job_whose_folder_cannot_be_made_leaves_no_row(store: Store) -> None:
    def fail(job_id: int) -> Path:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.add("job", fail)
    assert store.jobs() == []


def test_a_job_that_is_not_there_is_a_persons_error(store: Store) -> None:
    with pytest.raises(UserError) as caught:
        store.job(7)
    assert str(caught.value) == "There is no job 7.\n  hint: offmate status   [no-such-job]"
    assert caught.value.exit_code is Exit.NO_SUCH_JOB


@pytest.mark.parametrize(
    ("old", "new"), [(a, b) for a, b in itertools.product(JobState, JobState) if a is not b and b not in NEXT[a]]
)
def test_the_writer_refuses_ways_that_are_not_in_the_table(
    store: Store, paths: Paths, old: JobState, new: JobState
) -> None:
    number = add(store, paths)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET state = :state"), {"state": old.value})
    with pytest.raises(ValueError, match=f"from {old} to {new}"):
        store._write(number, old, new, None, {})
    assert store.job(number).state is old


def test_of_two_writers_one_wins(store: Store, paths: Paths) -> None:
    numbers = [add(store, paths) for _ in range(20)]
    others = [Store(store.url) for _ in range(4)]
    with ThreadPoolExecutor(len(others)) as pool:
        rounds = [list(pool.map(lambda s, n=n: s.take(n, JobState.PLANNING, ME), others)) for n in numbers]
    assert [sum(row is not None for row in taken) for taken in rounds] == [1] * len(numbers)


def test_higher_priority_is_due_first_then_the_lower_number(store: Store, paths: Paths) -> None:
    for priority in (0, 5, 0, 5):
        add(store, paths, priority=priority)
    assert [row.id for row in store.due(JobState.PLANNING, 9)] == [2, 4, 1, 3]
    assert [row.id for row in store.due(JobState.PLANNING, 1)] == [2]


def test_a_run_counts_its_attempts_and_keeps_its_figures(store: Store, paths: Paths) -> None:
    number = waiting(store, paths)
    run = RunFolder(paths.run_folder(number))
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    (run.checkpoints / "step-40").mkdir(parents=True)
    assert store.end(row, 75) is JobState.WAITING
    assert (store.job(number).attempts, store.job(number).last_checkpoint_step) == (1, 40)
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    end = {"event": "end", "time": time.time(), "step": 50, "status": "done", "output": "/out", "step_s": 0.5}
    run.metrics.write_text(json.dumps(end) + "\n")
    assert store.end(row, 0) is JobState.DONE
    row = store.job(number)
    assert (row.attempts, row.exit_code, row.owner, row.result) == (2, 0, None, end)
    assert row.ended_at is not None


def test_the_first_start_stays_and_each_attempt_is_told(store: Store, paths: Paths) -> None:
    number = waiting(store, paths)
    first = store.take(number, JobState.RUNNING, ME)
    assert first is not None
    run = RunFolder(paths.run_folder(number))
    (run.checkpoints / "step-40").mkdir(parents=True)
    run.metrics.write_text(json.dumps({"event": "step", "step": 45, "time": time.time()}) + "\n")
    store.end(first, -9)
    second = store.take(number, JobState.RUNNING, ME)
    assert second is not None
    store.stop(number, StopReason.CANCEL)
    store.end(second, -15)
    row = store.job(number)
    assert row.started_at == first.started_at == row.history[0]["started_at"] < row.history[1]["started_at"]
    told = ("number", "from_step", "reached_step", "checkpoint_step", "ending")
    assert [tuple(attempt[name] for name in told) for attempt in row.history] == [
        (1, None, 45, 40, "the trainer was killed by SIGKILL (signal 9)"),
        (2, 40, None, 40, "cancelled"),
    ]
    assert all(attempt["started_at"] <= attempt["ended_at"] for attempt in row.history)


@pytest.mark.parametrize("due", [JobState.SUBMITTED, JobState.WAITING])
def test_a_failed_job_comes_back_without_its_crashes_and_with_its_history(
    store: Store, paths: Paths, due: JobState
) -> None:
    number = waiting(store, paths)
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    assert store.end(row, 1) is JobState.FAILED
    row = store.retry(number, due)
    assert (row.state, row.crashes, row.error, row.ended_at, row.attempts) == (due, 0, None, None, 1)
    assert row.history[0]["ending"] == "the trainer failed with exit code 1"
    with pytest.raises(UserError, match=f"Job {number} is {due}; only a job that failed or was cancelled"):
        store.retry(number, due)


@pytest.mark.parametrize("damage", ["", "no json", "{}", "[7]", '[{"number": 1}]', "null"])
def test_a_damaged_history_begins_anew(store: Store, paths: Paths, damage: str) -> None:
    number = waiting(store, paths)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET history = :damage, attempts = 4"), {"damage": damage})
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    assert [attempt["number"] for attempt in row.history] == [5]
    assert store.end(row, 0) is JobState.DONE


@pytest.mark.parametrize("damage", ['{"ended_at": "late"}', '{"ended_at": [1]}'])
def test_a_row_that_cannot_be_begun_fails_and_is_due_no_more(store: Store, paths: Paths, damage: str) -> None:
    number = waiting(store, paths)
    attempt = {"number": 1, "started_at": 1.0, "from_step": None, "metrics_from": 0} | json.loads(damage)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET history = :damage"), {"damage": json.dumps([attempt])})
    assert store.take(number, JobState.RUNNING, ME) is None
    row = store.job(number)
    assert row.error is not None
    assert (row.state, row.error["code"]) == (JobState.FAILED, "job-not-handled")
    assert store.due(JobState.RUNNING, 1) == []


def test_who_lost_a_job_can_neither_end_it_nor_give_it_up(store: Store, paths: Paths) -> None:
    number = add(store, paths)
    mine = store.take(number, JobState.PLANNING, ME)
    assert mine is not None
    assert store.end(mine, None) is JobState.SUBMITTED
    other = Process(pid=1, started=0, boot="another")
    assert store.take(number, JobState.PLANNING, other) is not None
    assert store.end(mine, 0) is None
    store.give_up(mine, OSError("its run folder cannot be read"))
    row = store.job(number)
    assert (row.state, row.owner) == (JobState.PLANNING, str(other))


def test_a_cancel_ends_an_idle_job_and_marks_a_running_one(store: Store, paths: Paths) -> None:
    idle, running = add(store, paths), waiting(store, paths)
    row = store.take(running, JobState.RUNNING, ME)
    assert row is not None
    assert store.stop(idle, StopReason.CANCEL) is JobState.CANCELLED
    assert store.stop(running, StopReason.CANCEL) is JobState.RUNNING
    assert store.job(running).stop_reason is StopReason.CANCEL
    assert store.end(row, 75) is JobState.CANCELLED


def test_a_shutdown_does_not_soften_a_cancel(store: Store, paths: Paths) -> None:
    number = waiting(store, paths)
    store.take(number, JobState.RUNNING, ME)
    store.stop(number, StopReason.SHUTDOWN)
    store.stop(number, StopReason.CANCEL)
    store.stop(number, StopReason.SHUTDOWN)
    assert store.job(number).stop_reason is StopReason.CANCEL


def test_a_stop_of_a_job_that_is_over_changes_nothing(store: Store, paths: Paths) -> None:
    number = add(store, paths)
    store.stop(number, StopReason.CANCEL)
    before = store.job(number).ended_at
    assert store.stop(number, StopReason.CANCEL) in FINAL
    assert store.job(number).ended_at == before


def test_a_new_take_forgets_why_the_job_was_stopped(store: Store, paths: Paths) -> None:
    number = waiting(store, paths)
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    store.stop(number, StopReason.SHUTDOWN)
    assert store.end(row, 75) is JobState.WAITING
    assert store.job(number).stop_reason is StopReason.SHUTDOWN
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    assert row.stop_reason is None


def test_a_cancel_is_no_cancel_while_the_database_does_not_answer(store: Store, paths: Paths) -> None:
    number = waiting(store, paths)
    row = store.take(number, JobState.RUNNING, ME)
    assert row is not None
    store.stop(number, StopReason.CANCEL)
    assert cancelled(store, number)
    store.engine.dispose()
    paths.database.rename(paths.state / "away.db")
    assert not cancelled(store, number)


def test_looking_waits_for_nobody_who_writes(store: Store, paths: Paths) -> None:
    number = add(store, paths)
    with sqlite3.connect(paths.database, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        assert store.job(number).state is store.jobs()[0].state is JobState.SUBMITTED
        assert time.monotonic() - started < PATIENCE_S / 2
        other.execute("ROLLBACK")
    other.close()

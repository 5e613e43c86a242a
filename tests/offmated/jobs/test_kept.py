"""Databases as earlier versions left them, with jobs in every state, brought to this one."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from rich.console import Console

from offmated.api.views import job_view
from offmated.cli import job_view as words
from offmated.jobs import table
from offmated.jobs.listing import newest
from offmated.jobs.migrate import scripts_folder, upgrade
from offmated.jobs.retry import retry
from offmated.jobs.states import FINAL, TAKEN_FROM, JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from planner.cache import tables
from planner.errors import UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.kept import VERSIONS, lay_out

ME = Process.current()
STATES = {
    "killed": ["done", "failed", "failed", "cancelled", "cancelled", "running", "waiting", "planning", "submitted"],
    "down": ["done", "failed", "failed", "cancelled", "cancelled", "waiting", "waiting", "submitted", "submitted"],
}
RUNNING = 6
FIT_NOT, NO_DATA, CANCELLED = 2, 3, (4, 5)


def old(tmp_path: Path, version: str, which: str) -> tuple[Store, Paths]:
    """The store of a kept state folder, its database not yet upgraded, and the data its jobs name."""
    paths = Paths(state=tmp_path / "state", runtime=Path("/tmp/unused-by-these-tests"))
    lay_out(version, which, paths, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    return Store(f"sqlite:///{paths.database}"), paths


def kept(tmp_path: Path, version: str, which: str) -> Store:
    """The same, upgraded."""
    store, paths = old(tmp_path, version, which)
    upgrade(store.engine, paths)
    return store


def finish(store: Store) -> None:
    """Take every job that is due and end it well, as workers would, until none is due."""
    for phase in TAKEN_FROM:
        while due := store.due(phase, 1):
            row = store.take(due[0].id, phase, ME)
            assert row is not None
            assert store.end(row, 0) is not None


def test_there_is_a_kept_database_of_every_migration() -> None:
    scripts = ScriptDirectory(str(scripts_folder()))
    revisions = {script.revision for script in scripts.walk_revisions()}
    assert {name.partition("-")[0] for name in VERSIONS} >= revisions - {scripts.get_current_head()}


@pytest.mark.parametrize("which", STATES)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_database_has_this_versions_tables_and_its_own_jobs(version: str, which: str, tmp_path: Path) -> None:
    store, paths = old(tmp_path, version, which)
    with closing(sqlite3.connect(paths.database)) as before:
        kept_rows = before.execute("SELECT id, name, state, attempts, started_at, error, result FROM jobs").fetchall()
    upgrade(store.engine, paths)
    with store.engine.connect() as connection:
        both: Any = [table.metadata, tables.metadata]
        assert compare_metadata(MigrationContext.configure(connection), both) == []
    with closing(sqlite3.connect(paths.database)) as after:
        rows = after.execute("SELECT id, name, state, attempts, started_at, error, result FROM jobs").fetchall()
    assert rows == kept_rows
    assert [row.state for row in store.jobs()] == STATES[which]
    for row in store.jobs(JobState.RUNNING):
        last = row.history[-1]
        assert (
            last.items()
            >= {
                "number": row.attempts,
                "started_at": row.started_at,
                "from_step": row.last_checkpoint_step,
                "ended_at": None,
            }.items()
        )
    told = {"number", "started_at", "from_step", "ended_at", "ending", "reached_step", "checkpoint_step"}
    ended = [attempt for row in store.jobs() for attempt in row.history if attempt["ended_at"] is not None]
    assert all(set(attempt) - {"metrics_from"} == told for attempt in ended)
    assert ended or version.startswith("0001")


@pytest.mark.parametrize("stop", ["0002", "0003", "0004"])
@pytest.mark.parametrize("which", STATES)
def test_a_database_that_was_upgraded_before_is_mended_too(stop: str, which: str, tmp_path: Path) -> None:
    store, paths = old(tmp_path, "0001-last", which)
    at_once = kept(tmp_path / "other", "0001-last", which)
    configuration = AlembicConfig()
    configuration.set_main_option("script_location", str(scripts_folder()))
    with store.engine.begin() as connection:
        configuration.attributes["connection"] = connection
        command.upgrade(configuration, stop)
    with closing(sqlite3.connect(paths.database)) as before:
        histories = before.execute("SELECT history FROM jobs").fetchall()
    assert histories == [("[]",)] * 9, "what 0002 made of them"
    upgrade(store.engine, paths)
    for name in ("state", "owner", "history", "attempts", "crashes", "last_checkpoint_step"):
        ours, theirs = ([getattr(row, name) for row in each.jobs()] for each in (store, at_once))
        assert ours == theirs


@pytest.mark.sweep(2)
@pytest.mark.parametrize("which", STATES)
@pytest.mark.parametrize("version", VERSIONS)
def test_kept_jobs_go_on_to_their_end(version: str, which: str, tmp_path: Path) -> None:
    store = kept(tmp_path, version, which)
    for row in store.jobs(*TAKEN_FROM):
        assert store.end(row, None, blameless=True) is TAKEN_FROM[row.state]
    finish(store)
    assert [row.state for row in store.jobs()] == [*STATES[which][:5], *["done"] * 4]
    run = store.job(RUNNING)
    if which == "killed":
        assert [attempt["ending"] for attempt in run.history] == [
            "went down with the daemon or the machine",
            "the trainer is done",
        ]
        saved = RunFolder(Path(run.run_dir)).last_checkpoint_step()
        assert saved is not None
        assert run.history[0]["reached_step"] >= run.history[1]["from_step"] == saved


@pytest.mark.sweep(2)
@pytest.mark.parametrize("which", STATES)
@pytest.mark.parametrize("version", VERSIONS)
def test_kept_jobs_are_cancelled_and_tried_again(version: str, which: str, tmp_path: Path) -> None:
    store = kept(tmp_path, version, which)
    for number in range(RUNNING, 10):
        store.stop(number, StopReason.CANCEL)
    for row in store.jobs(*TAKEN_FROM):
        assert store.end(row, None) is JobState.CANCELLED
    assert {row.state for row in store.jobs()} <= FINAL
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        retry(store, NO_DATA)
    for number in (FIT_NOT, *CANCELLED, *range(RUNNING, 10)):
        goes_on = number in (CANCELLED[0], RUNNING) and RunFolder(Path(store.job(number).run_dir)).plan.exists()
        assert retry(store, number).state is (JobState.WAITING if goes_on else JobState.SUBMITTED), number
    finish(store)
    assert [row.state for row in store.jobs()] == ["done", "done", "failed", *["done"] * 6]


def shown(store: Store) -> str:
    """What `status` and `show` say of all jobs, their views sent as the API sends them."""
    views = json.loads(json.dumps([job_view(job) for job in newest(store, limit=99).jobs]))
    screen = Console(file=io.StringIO(), width=300)
    screen.print(words.jobs(views))
    for view in views:
        screen.print(words.job(view, RunFolder(Path(view["run_dir"])).read_plan()))
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("which", STATES)
@pytest.mark.parametrize("version", VERSIONS)
def test_kept_jobs_are_shown_before_and_after(version: str, which: str, tmp_path: Path) -> None:
    store = kept(tmp_path, version, which)
    before = shown(store)
    assert before.count("predicted for full rows") == 4, "jobs 1, 4, 6 and 7 have a plan"
    assert "another version" not in before
    assert "3/3 100%" in before
    assert "No schedule fits this memory budget." in before
    for row in store.jobs(*TAKEN_FROM):
        store.end(row, None, blameless=True)
    finish(store)
    assert shown(store).count("done") > before.count("done")


def test_a_plan_of_a_form_to_come_is_said_to_be_one(tmp_path: Path) -> None:
    store = kept(tmp_path, "0003-last", "down")
    run = RunFolder(Path(store.job(1).run_dir))
    plan = run.read_plan()
    assert plan is not None
    run.write_plan(plan | {"plan": plan["plan"] | {"tiers": 3}})
    assert "written by another version of offmate, and not to be shown by this one" in shown(store)

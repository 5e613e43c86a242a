"""Run folders that no job has, in a real database."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from offmated.jobs import queue_changes
from offmated.jobs.adopt import adopt, follow_runs, unknown
from offmated.jobs.states import Hold, JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.errors import UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.offmated.jobs.conftest import JOB


def left(store: Store, paths: Paths, name: str) -> Path:
    """A run folder of this name, as of a job that a database had."""
    row, _ = submit(store, paths, JOB, paths.state.parent)
    run = RunFolder(Path(row.run_dir))
    run.log.write_text("training\n")
    (run.checkpoints / "step-4").mkdir(parents=True)
    with store.writing() as session:
        session.delete(row)
    return run.path.rename(paths.runs / name)


def test_a_number_that_another_job_has_is_not_given_again_and_folders_stay(store: Store, paths: Paths) -> None:
    aside = left(store, paths, "1.lost-20260101-000000")
    own, far = left(store, paths, "7"), left(store, paths, "12")
    (paths.runs / "13").mkdir()  # no job's
    (paths.runs / "note.txt").write_text("somebody's")
    assert unknown(store, paths) == [own, far, aside]
    rows = adopt(store, paths).rows
    assert {(row.id, row.run_dir, row.state, row.last_checkpoint_step) for row in rows} == {
        (7, str(own), JobState.FAILED, 4),
        (12, str(far), JobState.FAILED, 4),
        (14, str(aside), JobState.FAILED, 4),
    }
    assert rows[0].error is not None and rows[0].error["hint"] == "offmate retry 7 goes on with it"
    assert adopt(store, paths).rows == [] == unknown(store, paths)
    assert submit(store, paths, JOB, paths.state.parent)[0].id == 15


def test_a_run_folder_that_cannot_be_taken_is_named_and_keeps_no_other_from_it(store: Store, paths: Paths) -> None:
    left(store, paths, "7")
    RunFolder(left(store, paths, "8")).process.write_text(str(Process.current()))
    torn = left(store, paths, "9")
    RunFolder(torn).resolved.write_bytes(b"model: [\xff")
    found = adopt(store, paths)
    assert [row.id for row in found.rows] == [7]
    assert [error.code for error in found.left] == ["run-lives", "run-unreadable"]
    assert str(torn) in found.left[1].what


def test_a_job_that_only_waited_is_held_with_its_name_and_one_that_was_refused_has_failed(
    store: Store, paths: Paths
) -> None:
    rows = [submit(store, paths, JOB, paths.state.parent, "evening.yaml")[0] for _ in range(2)]
    error = UserError("The data are of another kind.", code="wrong-kind")
    RunFolder(Path(rows[1].run_dir)).write_error(error)
    with store.writing() as session:
        for row in rows:
            session.delete(row)
    RunFolder(Path(rows[0].run_dir)).write_plan({})  # it waited for the GPU
    waits, refused = adopt(store, paths).rows
    assert (waits.id, waits.name, waits.state, waits.hold) == (1, "evening", JobState.SUBMITTED, Hold.HELD)
    assert (refused.state, refused.error) == (JobState.FAILED, error.to_json())
    queue_changes.release(store, waits.id)
    assert [row.id for row in store.due(JobState.PLANNING, 9)] == [waits.id]


def test_jobs_find_their_folders_where_the_state_folder_was_moved(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, JOB, paths.state.parent)
    there = paths.state.parent / "elsewhere"
    output = {"output": f"{row.run_dir}/output"}
    with store.writing() as session:
        session.get_one(JobRow, row.id).result = output
    store.engine.dispose()
    paths.state.rename(there)
    moved = Paths.at(there)
    store = Store(f"sqlite:///{moved.database}")
    follow_runs(store, moved)
    found = store.job(row.id)
    assert (found.run_dir, found.result) == (f"{moved.runs}/1", {"output": f"{moved.runs}/1/output"})
    assert unknown(store, moved) == []


def test_a_moved_job_does_not_take_the_folder_that_another_job_has(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, JOB, paths.state.parent)
    with store.writing() as session:
        session.get_one(JobRow, row.id).run_dir = "/gone/runs/1"
    (other,) = adopt(store, paths).rows
    assert (other.id, other.run_dir) == (2, row.run_dir)
    follow_runs(store, paths)
    assert store.job(row.id).run_dir == "/gone/runs/1"


def test_an_adopted_job_keeps_the_window_of_its_file(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    # While the window is open, begin_at is the time of the call, and the two calls come at different times. At noon it
    # is the time at which the window opens next.
    noon = datetime(2026, 6, 10, 12).timestamp()
    monkeypatch.setattr(time, "time", lambda: noon)
    row, _ = submit(store, paths, JOB + 'schedule: "23:00-07:00"\n', paths.state.parent)
    with store.writing() as session:
        session.delete(row)
    (found,) = adopt(store, paths).rows
    assert (found.window, found.begin_at) == (row.window, row.begin_at) and row.window is not None

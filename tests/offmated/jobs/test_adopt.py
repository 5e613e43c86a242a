"""Run folders that no job has, in a real database."""

from __future__ import annotations

from pathlib import Path

import pytest

from offmated.jobs.adopt import adopt, unknown
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
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
    (paths.runs / "13").mkdir()  # nobody has worked here
    (paths.runs / "note.txt").write_text("somebody's")
    assert unknown(store, paths) == [own, far, aside]
    rows = adopt(store, paths)
    assert {(row.id, row.run_dir, row.state, row.last_checkpoint_step) for row in rows} == {
        (7, str(own), JobState.FAILED, 4), (12, str(far), JobState.FAILED, 4), (14, str(aside), JobState.FAILED, 4),
    }  # fmt: skip
    assert adopt(store, paths) == [] == unknown(store, paths)
    assert submit(store, paths, JOB, paths.state.parent)[0].id == 15


def test_a_run_folder_in_which_a_process_works_is_left_alone_and_none_is_taken(store: Store, paths: Paths) -> None:
    left(store, paths, "7")
    RunFolder(left(store, paths, "8")).process.write_text(str(Process.current()))
    with pytest.raises(UserError) as caught:
        adopt(store, paths)
    assert (caught.value.code, list(store.jobs())) == ("run-lives", [])
    assert [row.id for row in adopt(store, paths, ["7"])] == [7]

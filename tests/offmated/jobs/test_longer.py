"""`offmate rerun --epochs`: a done job goes on, or one line says why it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from offmated.jobs.longer import Length
from offmated.jobs.states import JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import rerun, submit
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.errors import UserError
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.offmated.jobs.conftest import JOB

ME = Process.current()
LEVEL = f"{JOB}num_train_epochs: 2\nlr_scheduler_type: constant\nrun_name: first\n"


def done(store: Store, paths: Paths, text: str, *, saved: tuple[int, ...] = (7, 14)) -> JobRow:
    row, _ = submit(store, paths, text, paths.state.parent)
    for phase in (JobState.PLANNING, JobState.RUNNING):
        taken = store.take(row.id, phase, ME)
        assert taken is not None
        store.end(taken, 0)
    for step in saved:
        folder = RunFolder(Path(row.run_dir)).checkpoints / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    return store.job(row.id)


def test_a_done_job_goes_on_from_its_newest_checkpoint_as_a_new_one(store: Store, paths: Paths) -> None:
    first = done(store, paths, LEVEL)
    row, notes = rerun(store, paths, first.id, length=Length(epochs=5))
    run = RunFolder(Path(row.run_dir))
    assert (row.id, row.state, row.name) == (first.id + 1, JobState.SUBMITTED, "first")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-14"]
    assert (run.last_checkpoint_step(), run.goes_on.exists()) == (14, True)
    assert Job.from_resolved(run.resolved).num_train_epochs == 5
    assert notes == (
        f"it goes on from step 14 of job {first.id}, the newest checkpoint kept: under the same plan its numbers are "
        "those of 5 epochs from the start, in every bit",
    )


def test_the_seam_of_a_rate_that_falls_is_said(store: Store, paths: Paths) -> None:
    first = done(store, paths, f"{JOB}max_steps: 20\n")
    _, notes = rerun(store, paths, first.id, length=Length(max_steps=40))
    assert "while until there it was that of the shorter run (linear): its numbers are of neither" in notes[0]


@pytest.mark.parametrize(
    ("text", "saved", "length", "why"),
    [
        (LEVEL, (), Length(epochs=5), "it has no checkpoint any more"),
        (LEVEL, (7,), Length(epochs=2), "it has had 2 epochs"),
        (LEVEL, (7,), Length(max_steps=50), "its length is 2 epochs"),
        (f"{JOB}max_steps: 20\n", (7,), Length(epochs=5), "its length is max_steps, 20"),
        (f"{JOB}max_steps: 20\n", (7,), Length(max_steps=20), "it has had 20 steps"),
        (f"{LEVEL}val_size: 1\nload_best_model_at_end: true\n", (7,), Length(epochs=5), "it took its best evaluation"),
        (f"{LEVEL}val_size: 1\nearly_stopping_patience: 2\n", (7,), Length(epochs=5), "early_stopping_patience counts"),
    ],
)
def test_what_is_no_going_on_is_refused_in_one_line(
    text: str, saved: tuple[int, ...], length: Length, why: str, store: Store, paths: Paths
) -> None:
    (paths.state.parent / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    first = done(store, paths, text, saved=saved)
    with pytest.raises(UserError, match=f"Job {first.id} cannot go on for longer: {why}") as refused:
        rerun(store, paths, first.id, length=length)
    assert refused.value.code == "cannot-go-on"
    assert [row.id for row in store.jobs()] == [first.id], "something was left behind"
    assert [path.name for path in paths.runs.iterdir()] == [str(first.id)]


def test_a_job_that_goes_on_is_not_the_same_as_one_from_the_start(store: Store, paths: Paths) -> None:
    first = done(store, paths, LEVEL)
    row, _ = rerun(store, paths, first.id, length=Length(epochs=5))
    _, notes = submit(store, paths, LEVEL.replace("epochs: 2", "epochs: 5"), paths.state.parent)
    assert not any("is the same" in note for note in notes), notes
    _, notes = rerun(store, paths, first.id, length=Length(epochs=5))
    assert any(f"job {row.id}, which is submitted, is the same" in note for note in notes), notes
    _, notes = rerun(store, paths, row.id)
    assert f"from the start; job {row.id} went on from job {first.id}" in notes
    assert not any(f"job {row.id}, which" in note for note in notes), notes


def test_shares_of_all_steps_are_said_to_be_of_the_longer_run(store: Store, paths: Paths) -> None:
    (paths.state.parent / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    first = done(store, paths, f"{LEVEL}val_size: 1\neval_strategy: steps\neval_steps: 0.25\n")
    _, notes = rerun(store, paths, first.id, length=Length(epochs=5))
    assert notes[1] == "eval_steps, 0.25, is a share of 5 epochs now: evaluations are further apart"


def test_a_checkpoint_that_takes_no_second_name_is_refused_and_nothing_is_left(
    store: Store, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = done(store, paths, LEVEL)

    def elsewhere(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", elsewhere)
    with pytest.raises(UserError, match="cross-device") as refused:
        rerun(store, paths, first.id, length=Length(epochs=5))
    assert refused.value.code == "cannot-go-on"
    assert [path.name for path in paths.runs.iterdir()] == [str(first.id)]


def test_other_data_and_jobs_that_are_not_done_are_refused(store: Store, paths: Paths) -> None:
    first = done(store, paths, LEVEL)
    waiting, _ = submit(store, paths, f"{JOB}seed: 7\n", paths.state.parent)
    with pytest.raises(UserError, match="it is submitted"):
        rerun(store, paths, waiting.id, length=Length(epochs=9))
    (paths.state.parent / "text.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(UserError) as changed:
        rerun(store, paths, first.id, length=Length(epochs=5))
    assert changed.value.code == "data-changed"


def test_no_job_goes_on_for_longer_on_another_base(store: Store, paths: Paths) -> None:
    first = done(store, paths, LEVEL)
    tokenizer = paths.state.parent / "model" / "tokenizer.json"
    tokenizer.write_text("[]")
    with pytest.raises(UserError) as changed:
        rerun(store, paths, first.id, length=Length(epochs=5))
    assert (changed.value.code, changed.value.numbers) == ("base-changed", (f"{tokenizer}: other content",))
    assert changed.value.hint.endswith(f"offmate rerun {first.id} trains from the start on what is there now")
    rerun(store, paths, first.id)

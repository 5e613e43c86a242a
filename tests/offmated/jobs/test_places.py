"""Where jobs write their models: places that are no good, and places that are taken."""

from __future__ import annotations

import pytest

from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.paths import Paths
from planner.errors import Exit, UserError
from tests.offmated.jobs.conftest import JOB


def refusal(store: Store, paths: Paths, output_dir: str) -> UserError:
    with pytest.raises(UserError) as caught:
        submit(store, paths, f"{JOB}output_dir: {output_dir}\n", paths.state.parent)
    assert caught.value.exit_code == Exit.USAGE
    return caught.value


def test_a_place_where_no_model_can_go_is_refused_before_anything_is_kept(store: Store, paths: Paths) -> None:
    assert refusal(store, paths, "model").code == "output-exists"
    assert refusal(store, paths, "text.jsonl").code == "output-exists"
    assert refusal(store, paths, "text.jsonl/out").code == "output-unwritable"
    assert (list(store.jobs()), list(paths.runs.iterdir())) == ([], [])
    (paths.state.parent / "empty").mkdir()
    submit(store, paths, f"{JOB}output_dir: empty\n", paths.state.parent)


def test_a_place_in_offmates_own_folders_or_around_them_is_refused_wherever_links_lead(
    store: Store, paths: Paths
) -> None:
    home = paths.state.parent
    paths.broker.mkdir()
    (home / "link").symlink_to(paths.broker)
    for place in (paths.broker / "out", paths.runs / "7", paths.state, "link/out", f"{home}/state/../state/x"):
        assert refusal(store, paths, str(place)).code == "in-state-folder"
    error = refusal(store, paths, "link/out")
    assert error.what == f"output_dir: {home}/link/out is in offmate's own state folder."
    assert error.numbers[-1] == f"{home}/link/out is {paths.broker}/out"
    assert refusal(store, paths, str(home)).what.endswith("holds offmate's own state folder.")
    assert refusal(store, paths, f"out\ndisk_paths: [{paths.broker}]").code == "in-state-folder"
    assert (list(store.jobs()), list(paths.runs.iterdir()), list(paths.broker.iterdir())) == ([], [], [])
    submit(store, paths, f"{JOB}output_dir: out\ndisk_paths: [{home}]\n", home)


def test_a_place_is_tried_and_stays_as_it_was(store: Store, paths: Paths) -> None:
    home = paths.state.parent
    (home / "empty").mkdir()
    (home / "dangling").symlink_to("nowhere")
    before = sorted(home.rglob("*"))
    assert refusal(store, paths, "dangling").code == "output-unwritable"
    assert refusal(store, paths, "n" * 256).code == "output-unwritable"
    assert refusal(store, paths, "/proc/x").code == "output-unwritable"
    assert [path for path in sorted(home.rglob("*")) if path.parent != paths.state] == [
        path for path in before if path.parent != paths.state
    ]
    for place in ("empty", "n" * 252, "new/place"):
        row, _ = submit(store, paths, f"{JOB}output_dir: {place}\n", home)
        assert (home / place).exists() == (place == "empty")
        store.stop(row.id, StopReason.CANCEL)


def test_two_living_jobs_do_not_write_to_one_place(store: Store, paths: Paths) -> None:
    (paths.state.parent / "link").symlink_to(".")
    row, _ = submit(store, paths, f"{JOB}output_dir: out\n", paths.state.parent)
    error = refusal(store, paths, "link/out")
    assert (error.code, error.what.startswith(f"Job {row.id} writes its model to")) == ("output-taken", True)
    store.stop(row.id, StopReason.CANCEL)
    submit(store, paths, f"{JOB}output_dir: link/out\n", paths.state.parent)


def test_a_job_does_not_come_back_to_a_place_that_is_taken_meanwhile(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, f"{JOB}output_dir: out\n", paths.state.parent)
    store.stop(row.id, StopReason.CANCEL)
    before = store.job(row.id)
    submit(store, paths, f"{JOB}output_dir: out\n", paths.state.parent)
    with pytest.raises(UserError, match="output-taken"):
        store.retry(row.id, JobState.SUBMITTED)
    assert store.job(row.id).state is before.state is JobState.CANCELLED

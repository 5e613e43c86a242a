"""Taking jobs in, with a real database."""

from __future__ import annotations

from pathlib import Path

import pytest

from offmated.migrate import upgrade
from offmated.paths import Paths
from offmated.states import StopReason
from offmated.store import Store
from offmated.submission import submit
from planner.budgets import ram_bytes
from planner.errors import Exit, UserError
from planner.runfolder import RunFolder

JOB = "model: ./model\ndataset: text.jsonl\n"


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "text.jsonl").write_text('{"text": "one"}\n')
    paths = Paths.at(tmp_path / "state")
    paths.runs.mkdir(parents=True)
    return paths


@pytest.fixture
def store(paths: Paths) -> Store:
    store = Store(f"sqlite:///{paths.database}")
    upgrade(store.engine, paths)
    return store


def test_a_run_folder_that_a_lost_database_knew_is_kept_and_the_user_told(store: Store, paths: Paths) -> None:
    trained = paths.runs / "1" / "output" / "model.safetensors"
    trained.parent.mkdir(parents=True)
    trained.write_text("trained for a week")
    row, notes = submit(store, paths, JOB, paths.state.parent)
    assert row.run_dir == str(paths.runs / "1")
    (aside,) = (folder for folder in paths.runs.iterdir() if folder.name != "1")
    assert aside.name.startswith("1.lost-")
    assert (aside / "output" / "model.safetensors").read_text() == "trained for a week"
    assert not (paths.runs / "1" / "output").exists()
    assert notes[-1].endswith(f"its run folder is now {aside}")


def test_what_a_submission_that_was_cut_short_left_gives_way(store: Store, paths: Paths) -> None:
    (paths.runs / "1").mkdir()
    (paths.runs / "1" / "job.yaml").write_text("model: another\n")
    _, notes = submit(store, paths, JOB, paths.state.parent)
    assert [folder.name for folder in paths.runs.iterdir()] == ["1"]
    assert (paths.runs / "1" / "job.yaml").read_text() == JOB
    assert not any("lost" in note for note in notes)


def test_data_that_cannot_be_trained_on_leave_nothing_behind(store: Store, paths: Paths) -> None:
    (paths.state.parent / "text.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(UserError, match="found: body") as caught:
        submit(store, paths, JOB, paths.state.parent)
    assert caught.value.exit_code is Exit.USAGE
    assert (store.jobs(), list(paths.runs.iterdir())) == ([], [])


def test_the_log_says_which_data_nobody_has_looked_at(store: Store, paths: Paths) -> None:
    row, _ = submit(store, paths, JOB.replace("text.jsonl", "[owner/set, text.jsonl]"), paths.state.parent)
    (line,) = RunFolder(Path(row.run_dir)).tail_of_log(9)
    assert line.endswith("owner/set is of the Hugging Face hub: it is read when the job has its turn")


def test_a_budget_beyond_the_machine_is_refused_before_anything_is_kept(store: Store, paths: Paths) -> None:
    with pytest.raises(UserError, match="cpu_budget is more than the host has") as caught:
        submit(store, paths, JOB + f"cpu_budget: {ram_bytes() + 1}\n", paths.state.parent)
    assert (caught.value.code, caught.value.exit_code) == ("budget-too-large", Exit.USAGE)
    assert (store.jobs(), list(paths.runs.iterdir())) == ([], [])


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


def test_two_living_jobs_do_not_write_to_one_place(store: Store, paths: Paths) -> None:
    (paths.state.parent / "link").symlink_to(".")
    row, _ = submit(store, paths, f"{JOB}output_dir: out\n", paths.state.parent)
    error = refusal(store, paths, "link/out")
    assert (error.code, error.what.startswith(f"Job {row.id} writes its model to")) == ("output-taken", True)
    store.stop(row.id, StopReason.CANCEL)
    submit(store, paths, f"{JOB}output_dir: link/out\n", paths.state.parent)

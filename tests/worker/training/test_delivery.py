"""From the last step to the model folder, when the place has gone bad meanwhile, and on disks that get full."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.errors import UserError
from planner.job.base import freeze_base
from planner.job.output_dir import MARK
from planner.run.folder import RunFolder
from tests.support.disks import no_room_beyond
from tests.support.runs import STEPS, make_run
from worker.storage.checkpoint import Checkpoints, read_checkpoint
from worker.training import run as loading
from worker.training.loop import Training
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def then(patch: pytest.MonkeyPatch, act: object) -> None:
    """Call `act` when a run has done its last step."""
    run = Training.run

    def run_then_act(self: Training) -> bool:
        done = run(self)
        act()  # type: ignore[operator]
        return done

    patch.setattr(Training, "run", run_then_act)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def same(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def steps(run: RunFolder) -> list[object]:
    return [event["step"] for event in read_metrics(run.metrics) if event["event"] == "step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of the same job that nobody disturbed."""
    torch.set_num_threads(1)  # it is made before what each test has set
    folder = tmp_path_factory.mktemp("whole")
    _, run = make_run(folder, "llama")
    assert run_job(run, StopRequest())
    return run.output


@pytest.mark.parametrize("what", ["a file", "a full folder", "a dangling link", "its parent gone"])
def test_a_place_that_went_bad_costs_no_training_and_the_model_is_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, what: str
) -> None:
    place = tmp_path / "mine" / "out"
    place.parent.mkdir()
    _, run = make_run(tmp_path, "llama", output_dir=str(place))

    def spoil() -> None:
        match what:
            case "a file":
                place.write_text("precious")
            case "a full folder":
                place.mkdir()
                (place / "config.json").write_text("precious")
            case "a dangling link":
                place.symlink_to("nowhere")
            case "its parent gone":
                place.parent.rmdir()
                place.parent.write_text("precious")

    with monkeypatch.context() as patch:
        then(patch, spoil)
        with pytest.raises(UserError) as caught:
            run_job(run, StopRequest())
    error = caught.value
    assert error.what == f"The job is trained, and its model could not go to {place}."
    assert error.numbers[-1] == f"the trained model is in {run.output}"
    assert error.hint == f"mend that, then offmate retry {run.path.name}: nothing is trained again"
    assert error.code == ("output-exists" if what in ("a file", "a full folder") else "output-unwritable")
    assert same(run.output, whole)
    assert run.last_checkpoint_step() == STEPS
    assert read_metrics(run.metrics)[-1]["status"] == "failed"
    spoilt = [path for path in (place, place.parent, place / "config.json") if path.is_file() or path.is_symlink()]
    assert spoilt and all(path.is_symlink() or path.read_text() == "precious" for path in spoilt)
    with pytest.raises(UserError):  # as long as nobody has mended it
        run_job(run, StopRequest())
    for path in reversed(spoilt):
        path.unlink()
    assert run_job(run, StopRequest())
    assert same(place, whole)
    assert steps(run) == list(range(1, STEPS + 1)), "nothing was trained again"
    assert read_metrics(run.metrics)[-1]["output"] == str(place)
    assert not run.output.exists() and not run.trained.exists()
    assert json.loads((place / MARK).read_text())["step"] == STEPS


def test_a_model_folder_that_gets_no_room_is_written_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    _, run = make_run(tmp_path, "llama")
    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr("worker.storage.model_folder.Output._state_dict", lambda *_: (_ for _ in ()).throw(FULL))
        run_job(run, StopRequest())
    assert caught.value.code == "disk-full"
    assert caught.value.hint == "free some space there, and it goes there by itself: nothing is trained again"
    assert caught.value.numbers[-1] == f"the trained weights are kept in {run.trained}/step-{STEPS}"
    assert sorted(path.name for path in run.path.iterdir() if path.name.startswith(".")) == []
    assert run_job(run, StopRequest())
    assert same(run.output, whole)
    assert steps(run) == list(range(1, STEPS + 1))
    assert not run.trained.exists()


def test_a_job_that_is_trained_needs_its_bases_weights_no_more_and_all_that_goes_into_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    job, run = make_run(tmp_path, "llama")
    run.write_base(freeze_base(job, tmp_path))
    with monkeypatch.context() as patch, pytest.raises(UserError, match="could not go to"):
        patch.setattr("worker.storage.model_folder.Output._state_dict", lambda *_: (_ for _ in ()).throw(FULL))
        run_job(run, StopRequest())
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model)).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", job.model)
    words = Path(job.model) / "tokenizer.json"
    before = words.read_text()
    words.write_text(before.replace("<pad>", "<bad>"))
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert (caught.value.code, caught.value.numbers) == ("base-changed", (f"{words}: other content",))
    words.write_text(before)
    assert run_job(run, StopRequest())
    assert same(run.output, whole)


def test_a_base_that_changes_while_it_is_loaded_is_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, run = make_run(tmp_path, "llama")
    run.write_base(freeze_base(job, tmp_path))
    config = Path(job.model) / "config.json"
    load = loading.load_model

    def then_change(*given: Any, **more: Any) -> Any:
        model = load(*given, **more)
        config.write_text(config.read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.2'))
        return model

    monkeypatch.setattr(loading, "load_model", then_change)
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert (caught.value.code, caught.value.numbers) == ("base-changed", (f"{config}: other content",))
    assert steps(run) == []


FULL = OSError(28, "No space left on device", "model.safetensors")


@pytest.mark.parametrize("what", ["the checkpoints", "all that is large"])
def test_a_full_disk_ends_a_run_in_one_line_with_its_last_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path, what: str
) -> None:
    """The first checkpoint has room, what comes after it has not."""
    _, run = make_run(tmp_path, "llama", save_steps=4 if what == "the checkpoints" else 7)
    save = Checkpoints.save

    def save_the_first(self: Checkpoints, step: int, *rest: object) -> Path:
        path = save(self, step, *rest) if step != 8 else None
        limit.enter_context(no_room_beyond(200_000))
        return path or save(self, step, *rest)

    with monkeypatch.context() as patch, ExitStack() as limit, pytest.raises(UserError) as caught:
        patch.setattr(Checkpoints, "save", save_the_first)
        run_job(run, StopRequest())
    step = 4 if what == "the checkpoints" else 7
    assert caught.value.code == "disk-full"
    assert caught.value.hint.startswith("free some space; a job then goes on by itself")
    assert read_checkpoint(run.checkpoints / f"step-{step}").step == run.last_checkpoint_step() == step
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{step}"]
    assert read_metrics(run.metrics)[-1]["status"] == "failed"
    assert run_job(run, StopRequest())
    assert same(run.output, whole)
    assert steps(run) == list(range(1, STEPS + 1))

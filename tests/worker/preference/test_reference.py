"""The pass that scores all answers by the reference model: its numbers, stops in it, what is kept and shared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.hf_model import pairs_of
from planner.run.folder import RunFolder
from tests.support.lora_jobs import engine_of, finished_run, model_folder, plan_of
from tests.support.preference_jobs import preference_job
from tests.support.texts import byte_tokenizer, write_jsonl
from tests.worker.subspace.test_change import StopAt, begun_run, equal, trained
from worker.data.batches import Batches
from worker.engine.engine import Engine
from worker.training import reference
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest


def kept(run: RunFolder) -> np.ndarray:
    (file,) = (run.path / "reference").glob("*.npy")
    return np.load(file)


def scored_in_plain_pytorch(job: Job) -> np.ndarray:
    """The log-probabilities of both lines of each row, in the rows' order."""
    batches, model = Batches(job, byte_tokenizer()), load_model(job).eval()
    (rows, *_) = batches.preferences
    values = np.zeros((len(rows), 2), np.float32)
    for numbers, parts in batches.unscored(np.ones(len(rows), np.bool_), job.slice_rows, 1):
        for own, batch in zip(numbers, parts, strict=True):
            logits = model(input_ids=batch["input_ids"]).logits.float()
            logps = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
            values[own] = (logps * (batch["labels"][:, 1:] != -100)).sum(1).detach().numpy().reshape(2, -1).T
    return values


def passes(run: RunFolder) -> list[int]:
    """How many rows each pass of the run has scored."""
    return [event["rows"] for event in read_metrics(run.metrics) if event["event"] == "reference"]


class Interrupted(Exception):
    pass


def after_calls(monkeypatch: pytest.MonkeyPatch, calls: int, act: Any) -> None:
    """Do `act` in place of the call of `evaluate` that follows so many calls."""
    evaluate, count = Engine.evaluate, [0]

    def counting(self: Engine, batches: list[dict[str, Tensor]]) -> Any:
        count[0] += 1
        if count[0] == calls + 1:
            act()
        return evaluate(self, batches)

    monkeypatch.setattr(Engine, "evaluate", counting)
    monkeypatch.setattr(reference, "_TOGETHER", 1)


@pytest.mark.parametrize("keys", [{}, {"method": "lora", "lora_r": 4}, {"preference": "kto"}], ids=str)
def test_the_reference_is_the_model_as_it_is_before_training(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = preference_job(tmp_path, **keys)
    run = finished_run(job, tmp_path / "run")
    assert passes(run) == [9]
    np.testing.assert_allclose(kept(run), scored_in_plain_pytorch(job), rtol=1e-5)


def test_rows_that_are_only_evaluated_have_their_reference_too(tmp_path: Path) -> None:
    job = preference_job(tmp_path, "qwen2", val_size=3, eval_on_start=True)
    run = finished_run(job, tmp_path / "run")
    assert passes(run) == [9]
    first = next(event for event in read_metrics(run.metrics) if event["event"] == "eval")
    # The model is the reference still: each pair has a margin of 0, up to rounding in batches of other shapes.
    assert first["eval_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["eval_rewards_margins"] == pytest.approx(0, abs=1e-5)


def test_a_pass_that_was_stopped_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = preference_job(tmp_path)
    whole = finished_run(job, tmp_path / "whole")
    run, stop = begun_run(job, tmp_path / "halves"), StopRequest()
    (whole.path / "reference").rename(whole.path / "moved")  # else it would be taken
    with monkeypatch.context() as patched:
        after_calls(patched, 2, lambda: setattr(stop, "asked", True))
        assert not run_job(run, stop)
    assert np.isnan(kept(run)).any(axis=1).sum() == 3  # three calls of two rows each were done
    assert run_job(run, StopRequest())
    assert passes(run) == [3]
    np.testing.assert_array_equal(kept(run), np.load(next((whole.path / "moved").glob("*.npy"))))
    assert equal(trained(run), trained(whole))


def test_a_pass_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        raise Interrupted

    run = begun_run(preference_job(tmp_path), tmp_path / "run")
    with monkeypatch.context() as patched:
        after_calls(patched, 2, killed)
        with pytest.raises(Interrupted):
            run_job(run, StopRequest())
    assert run_job(run, StopRequest())
    assert passes(run) == [5]


def test_another_run_of_the_same_data_and_model_takes_the_reference(tmp_path: Path) -> None:
    first = finished_run(preference_job(tmp_path), tmp_path / "1")
    other = finished_run(preference_job(tmp_path, preference="ipo", learning_rate=1e-3), tmp_path / "2")
    assert (passes(first), passes(other)) == ([9], [])
    np.testing.assert_array_equal(kept(first), kept(other))


def test_other_data_have_a_reference_of_their_own(tmp_path: Path) -> None:
    finished_run(preference_job(tmp_path), tmp_path / "1")
    job = preference_job(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", [{"prompt": "Who? ", "chosen": "I", "rejected": "you"}] * 9)
    assert passes(finished_run(job, tmp_path / "2")) == [9]


def test_other_data_to_evaluate_on_have_a_reference_of_their_own(tmp_path: Path) -> None:
    kept_out = tmp_path / "held-out.jsonl"
    for number, answer in enumerate(("red", "blue")):
        write_jsonl(kept_out, [{"prompt": "Which? ", "chosen": answer, "rejected": "none"}] * 3)
        job = preference_job(tmp_path, eval_dataset=str(kept_out))
        assert passes(finished_run(job, tmp_path / str(number))) == [12]


def test_a_run_that_has_begun_keeps_its_reference_with_other_files_of_its_model(tmp_path: Path) -> None:
    run = begun_run(preference_job(tmp_path, save_steps=2), tmp_path / "run")
    assert not run_job(run, StopAt(run, 2))
    before = kept(run)
    other = other_model(tmp_path)
    (other / "model.safetensors").replace(Path(Job.from_resolved(run.resolved).model) / "model.safetensors")
    run.base.unlink()  # as offmate retry --allow-changed-model does
    assert run_job(run, StopRequest())
    np.testing.assert_array_equal(kept(run), before)


def test_an_adapter_to_go_on_from_has_a_reference_of_its_own(tmp_path: Path) -> None:
    first = finished_run(preference_job(tmp_path, preference="orpo", method="lora", lora_r=4), tmp_path / "adapter")
    goes_on = {"method": "lora", "adapter_name_or_path": str(first.output)}
    assert passes(finished_run(preference_job(tmp_path, **goes_on), tmp_path / "1")) == [9]
    weights = load_file(first.output / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, first.output / "adapter_model.safetensors")
    assert passes(finished_run(preference_job(tmp_path, **goes_on), tmp_path / "2")) == [9]


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_run_with_a_checkpoint_does_not_go_on_without_its_reference(tmp_path: Path, damage: str) -> None:
    run = begun_run(preference_job(tmp_path, save_steps=2), tmp_path / "run")
    assert not run_job(run, StopAt(run, 2))
    (file,) = (run.path / "reference").glob("*.npy")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    else:
        file.unlink()
    with pytest.raises(UserError, match="gone or damaged") as caught:
        run_job(run, StopRequest())
    assert caught.value.code == "reference-gone"


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path: Path) -> None:
    job = preference_job(tmp_path, "qwen2", preference="kto", save_steps=2)
    whole = finished_run(job, tmp_path / "1")
    halves = begun_run(job, tmp_path / "2")
    assert not run_job(halves, StopAt(halves, 2))
    assert run_job(halves, StopRequest())
    assert equal(trained(whole), trained(halves))


def other_model(tmp_path: Path, name: str = "llama", *, factor: float = 1.1) -> Path:
    folder = model_folder(tmp_path / "other", name)
    weights = {key: value * factor for key, value in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("keys", [{}, {"method": "lora", "lora_r": 4}], ids=str)
def test_ref_model_gives_the_reference(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = other_model(tmp_path)
    job = preference_job(tmp_path, ref_model=str(folder), **keys)
    run = finished_run(job, tmp_path / "run")
    expected = scored_in_plain_pytorch(job.model_copy(update={"model": str(folder)}))
    np.testing.assert_allclose(kept(run), expected, rtol=1e-5)
    assert not np.allclose(kept(run), scored_in_plain_pytorch(job), rtol=1e-3)


def test_a_pass_does_not_go_on_with_another_ref_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed() -> None:
        raise Interrupted

    folder = other_model(tmp_path)
    run = begun_run(preference_job(tmp_path, ref_model=str(folder)), tmp_path / "run")
    with monkeypatch.context() as patched:
        after_calls(patched, 2, killed)
        with pytest.raises(Interrupted):
            run_job(run, StopRequest())
    other_model(tmp_path, factor=1.2)
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert caught.value.code == "base-changed"


def test_a_run_with_a_checkpoint_does_not_ask_another_ref_model(tmp_path: Path) -> None:
    run = begun_run(preference_job(tmp_path, ref_model=str(other_model(tmp_path)), save_steps=2), tmp_path / "run")
    assert not run_job(run, StopAt(run, 2))
    for file in run.reference.iterdir():
        file.unlink()
    with pytest.raises(UserError) as caught:
        run_job(run, StopRequest())
    assert caught.value.code == "reference-gone"


def test_a_ref_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    job = preference_job(tmp_path, ref_model=str(other_model(tmp_path, "qwen2")))
    for act in (lambda: pairs_of(job), lambda: finished_run(job, tmp_path / "run")):
        with pytest.raises(UserError) as caught:
            act()
        assert caught.value.code == "ref-model-differs"


def test_the_reference_pass_stays_within_the_plan(tmp_path: Path) -> None:
    job = preference_job(tmp_path)
    plan, chain = plan_of(job)
    engine, _ = engine_of(job, plan, chain)
    batches = Batches(job, byte_tokenizer())
    for _, parts in batches.unscored(np.ones(9, np.bool_), job.slice_rows, 8):
        peak = engine.evaluate(parts).peak_bytes
        assert peak is not None and 0 < peak <= plan.gpu_budget_bytes
    engine.close()

"""What comes late in a run is tried before its first step, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from planner.errors import UserError
from planner.run.folder import RunFolder
from tests.support.runs import make_run
from worker.storage.checkpoint import Checkpoint, Origin
from worker.training import rehearsal
from worker.training.metrics import Metrics, read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")
LATE = {"max_steps": 2, "warmup_steps": 0, "val_size": 3, "sample_prompts": ["the quick"], "sample_tokens": 3}


def told(run: RunFolder, event: str) -> list[dict[str, object]]:
    return [found for found in read_metrics(run.metrics) if found["event"] == event]


def test_it_tries_what_comes_late_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = make_run(tmp_path, "llama", gradient_accumulation_steps=1, **LATE)
    assert run_job(run, StopRequest())
    (tried,) = told(run, rehearsal.TRIED)
    assert (tried["step"], tried["tried"]) == (
        0,
        "an evaluation of the longest rows, samples, a checkpoint, the files beside the weights",
    )
    assert [path.name for path in run.checkpoints.iterdir()] == []
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(rehearsal.Rehearsal, "run", lambda self: None)
    _, never = make_run(tmp_path / "other", "llama", gradient_accumulation_steps=1, **LATE)
    assert run_job(never, StopRequest())
    assert not told(never, rehearsal.TRIED)
    for event, figure in (("step", "loss"), ("eval", "eval_loss"), ("sample", "text")):
        assert [one[figure] for one in told(run, event)] == [one[figure] for one in told(never, event)] != []
    mine, its = (AutoModelForCausalLM.from_pretrained(each.output).state_dict() for each in (run, never))
    assert [name for name in mine if not torch.equal(mine[name], its[name])] == []


@pytest.mark.parametrize("late", ["evaluate", "checkpoint", "tokenizer"])
def test_what_would_fail_late_fails_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    _, run = make_run(tmp_path, "llama", gradient_accumulation_steps=1, **LATE)
    where = {
        "evaluate": "worker.engine.engine.Engine.evaluate",
        "checkpoint": "worker.storage.shards.FileRecord.of",
        "tokenizer": "transformers.PreTrainedTokenizerBase.save_pretrained",
    }[late]

    def fails(*_: object, **__: object) -> None:
        raise OSError("it fails late")

    monkeypatch.setattr(where, fails)
    with pytest.raises((UserError, OSError), match=r"it fails late|could not be saved in the end"):
        run_job(run, StopRequest())
    assert not told(run, "step")
    assert [path.name for path in run.checkpoints.iterdir()] == []


@pytest.mark.parametrize(
    ("asked_in", "never"),
    [
        ("worker.engine.engine.Engine.evaluate", "worker.engine.engine.Engine.generate"),
        ("worker.training.rehearsal.read_checkpoint", "worker.storage.model_folder.Output.write_files"),
    ],
)
def test_a_stop_waits_for_no_more_than_the_part_that_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_in: str, never: str
) -> None:
    _, run = make_run(tmp_path, "llama", gradient_accumulation_steps=1, **LATE)
    stop, act = StopRequest(), resolve_name(asked_in)

    def asks(*arguments: object, **named: object) -> object:
        stop.asked = True
        return act(*arguments, **named)

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("the stop is passed over")

    monkeypatch.setattr(asked_in, asks)
    monkeypatch.setattr(never, fails)
    assert not run_job(run, stop)
    assert [event["event"] for event in read_metrics(run.metrics)] == ["start", "end"]
    assert [end["status"] for end in told(run, "end")] == ["stopped"]
    assert [path.name for path in run.checkpoints.iterdir()] == []


def test_a_disk_that_gives_back_something_else_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = make_run(tmp_path, "llama", gradient_accumulation_steps=1)
    read = rehearsal.read_checkpoint

    def changed(path: Path) -> Checkpoint:
        (shard,) = path.glob("state-*")
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
        return read(path)

    monkeypatch.setattr(rehearsal, "read_checkpoint", changed)
    with pytest.raises(UserError, match="differs from what was written") as raised:
        run_job(run, StopRequest())
    assert raised.value.code == "disk-failed"


def test_of_tensors_larger_than_a_file_as_much_as_makes_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tensor of a real model, its embedding, has more bytes of state than a file of a checkpoint."""

    class NoEvaluations:
        def check(self) -> None:
            pass

        def try_out(self) -> tuple[str, ...]:
            return ()

    def states() -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield "scale", {"master": torch.tensor(2.0), "exp_avg": torch.tensor(0.5)}
        yield "embedding", {"master": torch.arange(40.0).view(4, 10), "exp_avg": torch.ones(4, 10)}
        yield "head", {"master": torch.ones(3)}

    back: list[dict[str, dict[str, Tensor]]] = []
    read = rehearsal.read_checkpoint

    def seen(path: Path) -> Checkpoint:
        found = read(path)
        back.append({name: {part: t.clone() for part, t in parts.items()} for name, parts in found.tensors()})
        return found

    monkeypatch.setattr(rehearsal, "read_checkpoint", seen)
    monkeypatch.setattr(rehearsal, "SHARD_BYTES", 88)
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        rehearsal.Rehearsal(
            checkpoints=tmp_path / "checkpoints",
            checkpoint_bytes=1000,
            origin=Origin(job={}, data="", total_steps=1, plan=""),
            states=states,
            write_files=lambda folder: None,
            evaluations=NoEvaluations(),
            metrics=metrics,
            stop=StopRequest(),
        ).run()
    (found,) = back
    assert sorted(found) == ["embedding", "scale"]
    assert found["scale"]["master"].tolist() == [2.0] and found["embedding"]["exp_avg"].tolist() == [1.0] * 10
    assert found["embedding"]["master"].tolist() == list(range(10))
    (tried,) = read_metrics(tmp_path / "metrics.jsonl")
    assert tried["tried"] == "the first 88 B of a checkpoint, the files beside the weights"

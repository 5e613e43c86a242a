"""Runs of a tiny model in the test's own process: the training loop around an engine that is plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.job.schema import Job
from planner.optimizers.adamw import AdamWGroup
from tests.support.plain_engine import PlainEngine
from tests.support.texts import CHATML, byte_tokenizer, make_job, sentences, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.storage.checkpoint import Checkpoint, Checkpoints, Origin
from worker.storage.trained import TrainedWeights
from worker.training.best import Best, known_losses
from worker.training.evaluation import Evaluations
from worker.training.learning_rate import decay_names
from worker.training.loop import Training
from worker.training.metrics import Event, Metrics, read_metrics
from worker.training.model import load_model
from worker.training.samples import Samples
from worker.training.stop import StopRequest


def tiny_job(tmp_path: Path, **keys: object) -> Job:
    small = {
        "max_length": 32,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
    }
    data = write_jsonl(tmp_path / "data.jsonl", sentences(9))
    return make_job(tiny_llama_folder(tmp_path / "model"), data, **{**small, **keys})


def give_a_loss_of_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models of the job's class compute their losses by themselves."""
    model = type(load_model(job))
    forward = model.forward

    def own(self: nn.Module, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        found = forward(self, **{key: value for key, value in inputs.items() if key != "num_items_in_batch"})
        found.loss = found.logits.float().mean()
        return found

    monkeypatch.setattr(model, "forward", own)


class Run:
    """One process's share of a run, in this process."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.batches = Batches(job, byte_tokenizer(), folder / "data")
        model = load_model(job)
        decay = {"weight_decay": job.weight_decay, "decay_names": decay_names(model)}
        optimizer = AdamWGroup(betas=(0.9, 0.99), eps=1e-8, **decay)
        self.engine = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
        origin = Origin(job={}, data=self.batches.fingerprint, total_steps=self.batches.total_steps, plan="")
        checkpoints = Checkpoints(folder / "checkpoints", keep=2, origin=origin)
        if last := checkpoints.latest():
            self.engine.load_state(last.tensors(), step=last.step)
        self.stop = StopRequest()
        self.metrics_path = folder / "metrics.jsonl"
        self.metrics = Metrics(self.metrics_path)
        self.metrics.write("start", step=self.engine.steps_done, resumed_from=last.step if last else None)
        evaluations = Evaluations(
            job=job,
            engine=self.engine,
            batches=self.batches,
            metrics=self.metrics,
            stop=self.stop,
            samples=Samples.of(job, byte_tokenizer(chat_template=CHATML), model),
            done=[(event["event"], event["step"]) for event in read_metrics(self.metrics_path)],
            losses=known_losses(read_metrics(self.metrics_path), last),
        )
        self.kept = TrainedWeights(folder / "best", origin=origin)
        best = Best(job=job, kept=self.kept, write=self._write) if Best.wanted(job) else None
        self.training = Training(
            job=job,
            engine=self.engine,
            batches=self.batches,
            checkpoints=checkpoints,
            metrics=self.metrics,
            stop=self.stop,
            state_bytes=1000,
            evaluations=evaluations,
            best=best,
            width=sum(self.batches.lengths),
            predicted_s=lambda batches: float(sum(batch["input_ids"].shape[1] for batch in batches)),
        )

    def _write(self, where: TrainedWeights) -> Checkpoint:
        weights = ((name, {"weight": parts["master"]}) for name, parts in self.engine.state())
        return where.write(weights, step=self.engine.steps_done)

    def before_each_step(self, act: Callable[[int], None]) -> None:
        step = self.engine.step

        def stepping(*args: object, **kwargs: object) -> object:
            act(self.engine.steps_done)
            return step(*args, **kwargs)

        self.engine.step = stepping

    def masters(self) -> dict[str, torch.Tensor]:
        return {name: parts["master"].clone() for name, parts in self.engine.state()}

    def evaluations(self) -> list[Event]:
        return [event for event in read_metrics(self.metrics_path) if event["event"] == "eval"]

    def losses(self) -> list[object]:
        return [event["loss"] for event in read_metrics(self.metrics_path) if event["event"] == "step"]


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())

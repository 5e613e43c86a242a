"""Label smoothing and NEFTune, against transformers' own code in plain PyTorch, to the last bit."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_pt_utils import LabelSmoother

from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.models.tokenizer import load_tokenizer
from planner.models.trainer_options import set_trainer_options
from planner.run.folder import RunFolder
from tests.support.plain_engine import PlainEngine
from tests.support.runs import make_run
from tests.support.short_runs import give_a_loss_of_its_own, tiny_job
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import learning_rate, optimizer_of
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

STEPS = 3

pytestmark = pytest.mark.usefixtures("one_thread")


class AsTrainer(nn.Module):
    """The model as transformers' Trainer calls it."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.inner, self._factor = model, job.label_smoothing_factor
        if job.neftune_noise_alpha is not None:
            activate_neftune(model, job.neftune_noise_alpha)

    def forward(self, labels: torch.Tensor, num_items_in_batch: torch.Tensor, **inputs: Any) -> Any:
        if not self._factor:
            return self.inner(labels=labels, num_items_in_batch=num_items_in_batch, **inputs)
        found = {"logits": self.inner(**inputs).logits.float()}
        smoother = LabelSmoother(epsilon=self._factor)
        return SimpleNamespace(loss=smoother(found, labels, shift_labels=True, num_items_in_batch=num_items_in_batch))


def plain_losses(job: Job, run: RunFolder) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(job.seed)
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    config = load_model(job).config
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    (settings,) = optimizer_of(job, model)
    named = replace(settings, decay_names=frozenset(f"inner.{name}" for name in settings.decay_names))
    plain = PlainEngine(AsTrainer(model, job), max_grad_norm=job.max_grad_norm, optimizer=named)
    batches = Batches(job, load_tokenizer(job), run.path / "data")
    losses = []
    for step in range(STEPS):
        data = batches.step(step)
        result = plain.step(
            data,
            seeds=[micro_batch_seed(job.seed, step, k) for k in range(len(data))],
            learning_rate=learning_rate(job, step, STEPS),
            num_items_in_batch=torch.tensor(batches.num_items(data)),
        )
        losses.append(float(torch.stack(result.losses).sum()))
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"neftune_noise_alpha": 5.0, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2}),
        ("gpt2", {"neftune_noise_alpha": 50.0, "bf16": True}),
    ],
    ids=["llama-both", "gpt2-noise"],
)
def test_a_run_gives_the_numbers_of_transformers_code(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    job, run = make_run(tmp_path, name, max_steps=STEPS, **keys)
    losses, weights = plain_losses(job, run)
    assert run_job(run, StopRequest())
    assert [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"] == losses
    trained = AutoModelForCausalLM.from_pretrained(run.output).parameters()
    assert all(torch.equal(one, other) for one, other in zip(trained, weights, strict=True))


def test_a_smoothed_loss_is_without_that_of_a_mixtures_routers_as_trainers_is(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, label_smoothing_factor=0.1)
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        vocab_size=32,
        output_router_logits=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = AsTrainer(copy.deepcopy(model), job)
    set_trainer_options(model, job)
    ids, items = torch.arange(16).reshape(2, 8), torch.tensor(14)
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": items}
    found = model(**batch)
    assert found.aux_loss > 0 and torch.equal(found.loss, plain(**batch).loss)


def test_a_model_with_a_loss_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, label_smoothing_factor=0.1)
    give_a_loss_of_its_own(job, monkeypatch)
    with pytest.raises(UserError, match="has a loss of its own") as refused:
        analyse(job, torch.device("cpu"))
    assert refused.value.code == "loss-not-smoothed"

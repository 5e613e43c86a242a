"""`loss_weighting: documents`: the mean over documents of the means over their tokens, however they lie in rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.integrations.neftune import activate_neftune

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
BY_DOCUMENT = {"loss_weighting": "documents"}

pytestmark = pytest.mark.usefixtures("one_thread")


def documents_of(batch: dict[str, Tensor]) -> list[list[tuple[int, int]]]:
    """(row, place) of each token to be predicted, by document; read from the labels one by one."""
    found: list[list[tuple[int, int]]] = []
    for row, labels in enumerate(batch["labels"].tolist()):
        for place, label in enumerate(labels):
            if place == 0 or ("position_ids" in batch and int(batch["position_ids"][row, place]) == 0):
                found.append([])
            elif label != -100:
                found[-1].append((row, place))
    return [document for document in found if document]


class ByDocument(nn.Module):
    """The loss written down from its definition, over transformers' logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        model.config.use_cache = False  # with one it would not look at how rows are packed

    def forward(self, labels: Tensor, num_items_in_batch: Tensor, **inputs: Any) -> Any:
        logits = self.inner(**inputs).logits.float()
        shares = torch.zeros(labels.shape)
        for document in documents_of({"labels": labels, **inputs}):
            for row, place in document:
                shares[row, place - 1] = 1 / len(document)
        target = torch.cat((labels[:, 1:], torch.full((len(labels), 1), -100)), dim=1)
        each = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.reshape(-1), reduction="none")
        return SimpleNamespace(loss=(each * shares.view(-1)).sum() / num_items_in_batch)


def plain_steps(job: Job, run: RunFolder) -> tuple[list[float], nn.Module]:
    config = load_model(job).config
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if job.bf16 else torch.float32).train()
    if job.neftune_noise_alpha is not None:
        activate_neftune(model, job.neftune_noise_alpha)
    (settings,) = optimizer_of(job, model)
    named = replace(settings, decay_names=frozenset(f"inner.{name}" for name in settings.decay_names))
    plain = PlainEngine(ByDocument(model), max_grad_norm=job.max_grad_norm, optimizer=named)
    batches = Batches(job, load_tokenizer(job), run.path / "data")
    losses = []
    for step in range(STEPS):
        data = batches.step(step)
        count = torch.tensor(sum(len(documents_of(batch)) for batch in data))
        result = plain.step(
            data,
            seeds=[micro_batch_seed(job.seed, step, k) for k in range(len(data))],
            learning_rate=learning_rate(job, step, STEPS),
            num_items_in_batch=count,
        )
        losses.append(float(torch.stack(result.losses).sum()))
    return losses, model


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"gradient_accumulation_steps": 2}),
        ("llama", {"gradient_accumulation_steps": 2, "packing": True, "max_length": 96}),
        ("gpt2", {"bf16": True, "neftune_noise_alpha": 5.0}),
    ],
    ids=["slices", "packed", "gpt2-bf16-noise"],
)
def test_a_run_gives_the_numbers_of_plain_pytorch(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    job, run = make_run(tmp_path, name, max_steps=STEPS, **BY_DOCUMENT, **keys)
    losses, plain = plain_steps(job, run)
    assert run_job(run, StopRequest())
    assert [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"] == losses
    trained = AutoModelForCausalLM.from_pretrained(run.output).parameters()
    assert all(torch.equal(one, other) for one, other in zip(trained, plain.parameters(), strict=True))


def test_packing_does_not_change_what_a_document_counts(tmp_path: Path) -> None:
    """Two rows of one document each, and one of both."""
    job = tiny_job(tmp_path, **BY_DOCUMENT)
    model = load_model(job).eval()
    ids, other = torch.arange(5, 17)[None], torch.arange(40, 44)[None]
    apart = [
        float(model(input_ids=row, labels=row, num_items_in_batch=torch.tensor(2)).loss.detach())
        for row in (ids, other)
    ]
    packed, positions = torch.cat((ids, other), 1), torch.cat((torch.arange(12), torch.arange(4)))[None]
    labels = packed.clone()
    labels[0, 12] = -100
    found = model(input_ids=packed, labels=labels, position_ids=positions).loss.detach()
    assert float(found) == pytest.approx(sum(apart), rel=1e-6)
    tokens = AutoModelForCausalLM.from_config(model.config).eval()
    tokens.load_state_dict(model.state_dict())
    other_mean = tokens(input_ids=packed, labels=labels, position_ids=positions).loss.detach()
    assert float(other_mean) != pytest.approx(sum(apart), rel=1e-3)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_loss_in_chunks_is_the_same(tmp_path: Path, packing: bool) -> None:
    keys = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "max_length": 96, "packing": packing, **BY_DOCUMENT}
    job, run = make_run(tmp_path, "llama", exact=False, **keys)
    assert json.loads(run.plan.read_text())["chain"]["blocks"][-1]["options"][0]["chunk_rows"]
    losses, _ = plain_steps(job, run)
    assert run_job(run, StopRequest())
    found = [event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"]
    assert found == pytest.approx(losses, rel=1e-5)


def test_evaluations_have_the_same_mean_and_say_how_many_tokens_they_read(tmp_path: Path) -> None:
    keys = {"val_size": 7, "eval_on_start": True, "max_steps": 1, "warmup_steps": 0, "packing": True, "max_length": 96}
    job, run = make_run(tmp_path, "llama", **keys, **BY_DOCUMENT)
    assert run_job(run, StopRequest())
    trained = ByDocument(AutoModelForCausalLM.from_pretrained(run.output).eval())
    held_out = Batches(job, load_tokenizer(job), run.path / "data").evaluation
    assert held_out is not None
    total, count, tokens = 0.0, 0, 0
    for number in range(len(held_out)):
        batch = {key: value for key, value in held_out.batch(number).items() if key != "num_items_in_batch"}
        documents = documents_of(batch)
        with torch.no_grad():
            total += float(trained(**batch, num_items_in_batch=torch.tensor(1)).loss)
        count, tokens = count + len(documents), tokens + sum(map(len, documents))
    last = [event for event in read_metrics(run.metrics) if event["event"] == "eval"][-1]
    assert count == 7 and last["tokens"] == tokens
    assert last["eval_loss"] == pytest.approx(total / count, rel=1e-6)


def test_the_loss_of_a_mixtures_routers_is_added_to_it(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, **BY_DOCUMENT)
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
    ids = torch.arange(16).reshape(2, 8)
    items = {"num_items_in_batch": torch.tensor(2)}
    expected = ByDocument(model)(labels=ids, input_ids=ids, **items).loss
    set_trainer_options(model, job)
    found = model(input_ids=ids, labels=ids, **items)
    assert torch.equal(found.loss, expected + model.router_aux_loss_coef * found.aux_loss)


def test_a_model_with_a_loss_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tiny_job(tmp_path, gradient_accumulation_steps=1, **BY_DOCUMENT)
    give_a_loss_of_its_own(job, monkeypatch)
    with pytest.raises(UserError, match="has a loss of its own") as refused:
        analyse(job, torch.device("cpu"))
    assert refused.value.code == "loss-not-weighted"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "keep one of the two"),
        ({"packing": "wrapped"}, "none can be weighted by itself"),
        ({"loss_weighting": "rows"}, "it must be tokens or documents"),
    ],
    ids=["smoothed", "wrapped", "unknown"],
)
def test_what_it_cannot_be_together_with_is_refused(tmp_path: Path, keys: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny_job(tmp_path, **{**BY_DOCUMENT, **keys})

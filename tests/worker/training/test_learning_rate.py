"""Learning rates and weight decay groups are transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, get_scheduler

from planner.job.schema import Job
from planner.keys.schedules import SCHEDULES
from tests.support.texts import make_job, tiny_llama_folder, write_jsonl
from tests.support.tiny_models import make_model
from worker.training.learning_rate import decay_names, learning_rate, learning_rates, optimizer_of, warmup_steps


def job(tmp_path: Path, **keys: object) -> Job:
    return make_job(tiny_llama_folder(tmp_path / "m"), write_jsonl(tmp_path / "d.jsonl", [{"text": "a"}]), **keys)


OWN: dict[str, dict[str, object]] = {
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 1e-6, "power": 2.0},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-6, "warmup_lr_rate": 0.2},
    "warmup_stable_decay": {"num_decay_steps": 6, "decay_type": "1-sqrt"},
}


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 0.1, 40])
@pytest.mark.parametrize("rate", [5e-5, 3.3e-4])
def test_every_step_has_the_rate_of_transformers_to_the_bit(
    tmp_path: Path, kind: str, warmup: float, rate: float
) -> None:
    own = OWN.get(kind)
    our_job = job(tmp_path, lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=rate, lr_scheduler_kwargs=own)
    total = 23
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = get_scheduler(kind, optimizer, warmup_steps(our_job, total), total, own)
    for step in range(total):
        assert learning_rate(our_job, step, total) == scheduler.get_last_lr()[0], step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (3, 3), (0.1, 10), (0.101, 11), (1, 1)])
def test_a_warmup_below_one_is_a_share_of_all_steps_rounded_up(tmp_path: Path, warmup: float, steps: int) -> None:
    assert warmup_steps(job(tmp_path, warmup_steps=warmup), 100) == steps


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "bloom"])
def test_the_parameters_that_decay_are_those_of_transformers(name: str) -> None:
    model = make_model(name)
    theirs = set(Trainer.get_decay_parameter_names(None, model))
    assert decay_names(model) == {n for n, _ in model.named_parameters() if n in theirs}
    assert not any("bias" in name or "norm" in name for name in decay_names(model))


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_with_decay_all_biases_and_norms_decay_too(tmp_path: Path, optim: str) -> None:
    model = make_model("qwen2")
    for group in optimizer_of(job(tmp_path, weight_decay=0.01, decay_all=True, optim=optim), model):
        assert group.decay_names == {name for name, _ in model.named_parameters()}, "as torch.optim.AdamW itself"


@pytest.mark.parametrize("keys", [{"embedding_lr": 1e-3}, {"embedding_lr_scale": 0.1}], ids=["rate", "scale"])
def test_embedding_and_head_have_the_rate_of_axolotls_group_and_do_not_decay(
    tmp_path: Path, keys: dict[str, float]
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", ["text"])
    folder = tiny_llama_folder(tmp_path / "model")
    schedule = {"learning_rate": 3e-4, "lr_scheduler_type": "cosine", "warmup_steps": 2}
    job = make_job(folder, data, weight_decay=0.1, **schedule, **keys)
    model = make_model("llama")
    layers, apart = optimizer_of(job, model)
    assert apart.names == {"model.embed_tokens.weight", "lm_head.weight"} and apart.decay_names == frozenset()
    assert layers.names is not None and layers.names | apart.names == {name for name, _ in model.named_parameters()}
    assert layers.decay_names & layers.names == decay_names(model) - apart.names
    embedding_lr = job.embedding_lr or 3e-4 * 0.1
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (3e-4, embedding_lr)]
    optimizer = torch.optim.AdamW(groups)
    scheduler = get_scheduler("cosine", optimizer, 2, 9)
    for step in range(9):
        assert list(learning_rates(job, step, 9)) == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()

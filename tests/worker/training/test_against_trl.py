"""Files of TRL's train the same bits here as in TRL's own trainer.

Its `SFTTrainer` gets the batches that the job has, in the job's order, and the model's own loss: its fused head rounds
otherwise, and has a test within rounding. The loss of each step, the learning rates, adapters as they begin, clipping,
the optimizer and the trained weights are TRL's. Of its rows is `tests/worker/data/test_rows_of_trl.py`. GPT-2 is not
among the models: of these transformers' trainer counts one token a row too many, and its loss is smaller by that.

Some tests take seconds: a model is traced for its plan, and again for its engine.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
import yaml
from datasets import Dataset
from torch import Tensor
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config

from planner.job.schema import Job
from tests.support.families import FAMILIES
from tests.support.lora_jobs import engine_of, plan_of
from tests.support.plain_engine import PlainEngine
from tests.support.texts import byte_tokenizer, sentences, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import learning_rates, optimizer_of
from worker.training.model import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""The loss and the learning rate of each step, and the trained weights."""
FULL = {
    "max_length": 24,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "bf16": False,
}
LORA = {**FULL, "use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
}
RECORDS = sentences(9)


def job_of(tmp_path: Path, family: str, file: dict[str, Any]) -> Job:
    """The job in a file of TRL's, of a model without dropout, whose draws are in no order."""
    folder = tiny_llama_folder(tmp_path / "model")
    cls, config = FAMILIES[family]
    still = {key: 0.0 for key in config if "drop" in key}
    torch.manual_seed(5)
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    T.AutoModelForCausalLM.from_config(cls(**{**config, **still, **tokens})).save_pretrained(folder)
    write_jsonl(tmp_path / "data.jsonl", RECORDS)
    return Job.parse(yaml.safe_dump({"model_name_or_path": "model", "dataset_name": "data.jsonl", **file}), tmp_path)


def trained_here(job: Job, *, planned: bool) -> Trained:
    """`planned`: by the engine, under a plan where all travels; else in plain PyTorch, which is the same bits."""
    batches, losses, rates = Batches(job, byte_tokenizer()), [], []
    engine: Any
    if planned:
        engine, model = engine_of(job, *plan_of(job))
    else:
        model = load_model(job)
        (optimizer,) = optimizer_of(job, model)
        engine = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
    for number in range(batches.total_steps):
        step, rate = batches.step(number), learning_rates(job, number, batches.total_steps)
        result = engine.step(
            step,
            seeds=[micro_batch_seed(job.seed, number, k) for k in range(len(step))],
            learning_rate=rate,
            num_items_in_batch=torch.tensor(batches.num_items(step)),
        )
        losses.append(float(torch.stack(list(result.losses)).sum()))
        rates.append(float(rate))  # type: ignore[arg-type]
    if planned:
        engine.restore()
        engine.close()
    return losses, rates, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def trained_by_trl(tmp_path: Path, job: Job, file: dict[str, Any], *, own_loss: bool = False) -> Trained:
    """`own_loss`: TRL's fused one."""
    batches = Batches(job, byte_tokenizer())
    data = [batch for number in range(batches.total_steps) for batch in batches.step(number)]
    # Padding is on the right, so a causal model needs no mask for it, and offmate gives none. With a mask transformers
    # takes another path through attention, whose last bits differ on some CPUs. TRL counts tokens by its mask.
    data = [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in data]

    class InOrder(SFTTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(data, batch_size=None)

    def of(config: Any) -> dict[str, Any]:
        known = {field.name for field in dataclasses.fields(config)}
        return {key: value for key, value in file.items() if key in known}

    settings = SFTConfig(
        **of(SFTConfig),
        output_dir=str(tmp_path / "trl"),
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        activation_checkpointing=False,
    )
    model: Any = T.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)

    def models_own(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        loss: Tensor = model.loss_function(
            logits=outputs.logits,
            labels=labels,
            vocab_size=model.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        return loss

    torch.manual_seed(job.seed)
    trainer = InOrder(
        model,
        settings,
        train_dataset=Dataset.from_list(RECORDS),
        processing_class=byte_tokenizer(),
        peft_config=get_peft_config(ModelConfig(**of(ModelConfig))),
        compute_loss_func=None if own_loss or file.get("label_smoothing_factor") else models_own,
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    trained = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return [line["loss"] for line in logged], [line["learning_rate"] for line in logged], trained


def assert_same_bits(ours: Trained, theirs: Trained) -> None:
    assert ours[0] == theirs[0], "the losses"
    assert ours[1] == pytest.approx(theirs[1], rel=1e-12), "the learning rates"
    assert ours[2].keys() == theirs[2].keys()
    assert [name for name in theirs[2] if not torch.equal(ours[2][name], theirs[2][name])] == []


METHODS = {"full": FULL, "lora": LORA, "dora": {**LORA, "use_dora": True}}


@pytest.mark.parametrize("method", METHODS)
def test_an_engine_trains_the_bits_that_trl_trains(tmp_path: Path, method: str) -> None:
    job = job_of(tmp_path, "llama", METHODS[method])
    assert job.method == ("full" if method == "full" else "lora")
    assert_same_bits(trained_here(job, planned=True), trained_by_trl(tmp_path, job, METHODS[method]))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2", "qwen3", "gemma3", "phi3", "mistral"])
def test_families_are_trained_as_trl_trains_them(tmp_path: Path, family: str, method: str) -> None:
    job = job_of(tmp_path, family, METHODS[method])
    assert_same_bits(trained_here(job, planned=False), trained_by_trl(tmp_path, job, METHODS[method]))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_trls(tmp_path: Path, schedule: str) -> None:
    more = {"lr_scheduler_kwargs": SCHEDULES[schedule]} if SCHEDULES[schedule] else {}
    file = {**FULL, "max_steps": 7, "lr_scheduler_type": schedule, "warmup_steps": 0 if schedule == "constant" else 2}
    job = job_of(tmp_path, "llama", {**file, **more})
    assert_same_bits(trained_here(job, planned=False), trained_by_trl(tmp_path, job, {**file, **more}))


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
        {"weight_decay": 0.1, "max_grad_norm": 0.1},
        {"max_grad_norm": 0.0},
        {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"label_smoothing_factor": 0.1},
    ],
    ids=lambda more: "-".join(more),
)
def test_accumulation_decay_clipping_and_the_optimizer_are_trls(tmp_path: Path, more: dict[str, Any]) -> None:
    file = {**FULL, **more}
    job = job_of(tmp_path, "llama", file)
    assert_same_bits(trained_here(job, planned=False), trained_by_trl(tmp_path, job, file))


@pytest.mark.parametrize("method", METHODS)
def test_trls_own_loss_is_the_same_within_rounding(tmp_path: Path, method: str) -> None:
    job = job_of(tmp_path, "llama", METHODS[method])
    ours, theirs = trained_here(job, planned=False), trained_by_trl(tmp_path, job, METHODS[method], own_loss=True)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, weights in theirs[2].items():
        torch.testing.assert_close(ours[2][name], weights, atol=1e-3, rtol=0)

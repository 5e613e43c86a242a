"""Learns from preferences with a job of ours, and with TRL's own trainers on the same batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from planner.job.schema import Job
from planner.run.folder import RunFolder
from tests.support.families import FAMILIES
from tests.support.lora_jobs import config_of_peft, engine_of, plan_of
from tests.support.plain_engine import PlainEngine
from tests.support.texts import byte_tokenizer, make_job, tiny_llama_folder, write_jsonl
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.training.learning_rate import learning_rates, optimizer_of
from worker.training.metrics import Metrics
from worker.training.model import load_model
from worker.training.pair_figures import pair_figures
from worker.training.reference import Reference
from worker.training.stop import StopRequest

IGNORED = -100
Batch = dict[str, Tensor]


@dataclass(kw_only=True)
class Trained:
    """The loss, the learning rate and the figures of each step, the clipped gradients of the first one, and the trained
    weights."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def keep_gradients(self, model: nn.Module) -> None:
        if not self.gradients:
            grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
            self.gradients = {name: g.clone() for name, g in grads.items() if g is not None}

    def keep_weights(self, model: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def records_of(preference: str, seed: int, count: int = 9) -> list[dict[str, object]]:
    """Prompts and answers of random lengths, some of them longer together than the jobs' rows."""
    draw = random.Random(seed)

    def words(most: int) -> str:
        return "".join(draw.choices("abcde fgh.", k=draw.randint(1, most)))

    records: list[dict[str, object]] = []
    for number in range(count):
        prompt, chosen, rejected = words(14), words(12), words(12)
        if preference == "kto":
            records.append({"prompt": prompt, "completion": chosen, "label": number % 3 != 1})
        else:
            records.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return records


def family_job(tmp_path: Path, family: str, *, seed: int = 0, **keys: Any) -> Job:
    """A job in fp32 of a tiny model of the family, without dropout."""
    folder = tiny_llama_folder(tmp_path / "model")
    cls, config = FAMILIES[family]
    still = {key: 0.0 for key in config if "drop" in key}
    torch.manual_seed(seed)
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    AutoModelForCausalLM.from_config(cls(**{**config, **still, **tokens})).save_pretrained(folder)
    data = write_jsonl(tmp_path / "data.jsonl", records_of(keys["preference"], seed))
    small = {
        "max_length": 24,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "preference_beta": 0.3,
        "seed": seed,
    }
    return make_job(folder, data, **{**small, **keys})


# ---- here


def scored(job: Job) -> Batches:
    """The job's batches with the reference's log-probabilities, by the model in plain PyTorch."""
    batches = Batches(job, byte_tokenizer())
    if job.refers:
        model: Any = load_model(job).eval()
        (rows,) = batches.preferences
        values = np.zeros((len(rows), 2), np.float32)
        for numbers, some in batches.unscored(np.arange(len(rows)), job.slice_rows, 8):
            for own, batch in zip(numbers, some, strict=True):
                with torch.no_grad():
                    values[own] = model(**batch).figures.numpy().reshape(2, -1).T
        rows.reference = values
    return batches


def trained_here(job: Job, batches: Batches) -> Trained:
    """In plain PyTorch, with the model and the loss of the job."""
    found, model = Trained(), load_model(job)
    (optimizer,) = optimizer_of(job, model)
    engine = PlainEngine(model, optimizer=optimizer, max_grad_norm=job.max_grad_norm)
    figures: list[Tensor] = []
    model.register_forward_hook(lambda module, args, result: figures.append(result.figures))
    for own in engine.optimizers:
        own.register_step_pre_hook(lambda *_: found.keep_gradients(model))
    _train(job, batches, found, engine, lambda result: [figures.pop(0) for _ in result.losses])
    found.keep_weights(model)
    return found


def trained_under_a_plan(job: Job, tmp_path: Path) -> tuple[Trained, Batches]:
    """By the engine, which computes the reference first; without the gradients, which it does not keep."""
    found, batches = Trained(), Batches(job, byte_tokenizer())
    plan, chain = plan_of(job)
    engine, model = engine_of(job, plan, chain)
    if job.refers:
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir()
        assert Reference(job, batches, folder, plan).compute(engine, Metrics(folder.metrics), StopRequest())
    _train(job, batches, found, engine, lambda result: list(result.figures))
    engine.restore()
    engine.close()
    found.keep_weights(model)
    return found, batches


def _train(
    job: Job, batches: Batches, found: Trained, engine: Any, figures_of: Callable[[Any], Sequence[Tensor]]
) -> None:
    for number in range(batches.total_steps):
        step, rate = batches.step(number), learning_rates(job, number, batches.total_steps)
        result = engine.step(
            step,
            seeds=[micro_batch_seed(job.seed, number, k) for k in range(len(step))],
            learning_rate=rate,
            num_items_in_batch=torch.tensor(batches.num_items(step)),
        )
        found.losses.append(float(torch.stack(list(result.losses)).sum()))
        assert isinstance(rate, float), "all parameters have one"
        found.rates.append(rate)
        found.figures.append(pair_figures(job, step, figures_of(result)))


# ---- there


def trl_batches(job: Job, batches: Batches) -> list[Batch]:
    """All of the job's batches, in the form that TRL's trainers get from their collators."""
    assert job.preference is not None
    return [_CONVERT[job.preference](batch) for n in range(batches.total_steps) for batch in batches.step(n)]


def trl_trainer(tmp_path: Path, job: Job, batches: Batches, *, own_head: bool, own_reference: bool = False) -> Any:
    """TRL's trainer for the job's loss, on `batches`. Without `own_head` its log-probabilities are those of
    `log_softmax` over the model's logits, and the model gets no mask: padding is on the right, so a causal model needs
    none, and with a mask transformers take another path through attention, whose last bits differ on some CPUs.
    `own_reference`: TRL computes the reference; else it gets that of the batches."""
    trainer_class, config_class, of_loss = _trainer_of(job)
    data: Any = trl_batches(job, batches)

    def in_order(_: object) -> Any:
        return torch.utils.data.DataLoader(data, batch_size=None)

    config = config_class(
        output_dir=str(tmp_path / "trl"),
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job.per_device_train_batch_size,
        gradient_accumulation_steps=job.gradient_accumulation_steps,
        max_steps=job.max_steps,
        learning_rate=job.learning_rate,
        lr_scheduler_type=job.lr_scheduler_type,
        max_grad_norm=job.max_grad_norm or 0.0,
        adam_epsilon=job.adam_epsilon,
        weight_decay=job.weight_decay,
        max_length=job.max_length,
        seed=job.seed,
        beta=job.preference_beta,
        **of_loss,
    )
    with ExitStack() as changes:
        if not own_head:
            for module in ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"):
                changes.enter_context(patch(f"{module}.add_fused_lm_head", _add_plain_head))
        torch.manual_seed(job.seed)
        trainer = type(trainer_class.__name__, (trainer_class,), {"get_train_dataloader": in_order})(
            AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(records_of(str(job.preference), job.seed)),
            processing_class=byte_tokenizer(),
            peft_config=config_of_peft(job) if job.method == "lora" else None,
        )
    if hasattr(trainer, "precompute_ref_logps"):
        trainer.precompute_ref_logps = not own_reference
    if not own_head:
        trainer.model.register_forward_pre_hook(_without_mask, with_kwargs=True)
    return trainer


def trained_by_trl(
    tmp_path: Path, job: Job, batches: Batches, *, own_head: bool, own_reference: bool = False
) -> Trained:
    """By `trl_trainer`."""
    trainer = trl_trainer(tmp_path, job, batches, own_head=own_head, own_reference=own_reference)
    found = Trained()
    trainer.add_callback(_Keep(found))
    with ExitStack() as changes:
        if not own_head:
            for module in ("trl.experimental.cpo.cpo_trainer", "trl.experimental.orpo.orpo_trainer"):
                changes.enter_context(patch(f"{module}.selective_log_softmax", _plain_log_probs))
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    found.losses, found.rates = [line["loss"] for line in logged], [line["learning_rate"] for line in logged]
    found.figures = [
        {key.replace("/", "_"): value for key, value in line.items() if key.startswith(("rewards/", "logps/", "kl"))}
        for line in logged
    ]
    found.keep_weights(trainer.model)
    return found


class _Keep(TrainerCallback):
    """Keeps the first step's gradients."""

    def __init__(self, found: Trained) -> None:
        self._found = found

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._found.keep_gradients(given["model"])


def _trainer_of(job: Job) -> tuple[Any, Any, dict[str, Any]]:
    """TRL's trainer of the job's loss, its config, and what the config says of the loss."""
    smoothing: dict[str, Any] = {"label_smoothing": job.preference_smoothing}
    share: dict[str, Any] = {"cpo_alpha": job.sft_share}
    match job.preference:
        case "orpo":
            return ORPOTrainer, ORPOConfig, {"disable_dropout": True}
        case "cpo":
            return CPOTrainer, CPOConfig, {"loss_type": "sigmoid", **share, **smoothing}
        case "simpo":
            return CPOTrainer, CPOConfig, {"loss_type": "simpo", "simpo_gamma": job.simpo_gamma, **share, **smoothing}
        case "kto":
            weights = {"desirable_weight": job.desirable_weight, "undesirable_weight": job.undesirable_weight}
            return KTOTrainer, KTOConfig, {**weights, "train_sampling_strategy": "sequential"}
    loss = "sigmoid" if job.preference == "dpo" else job.preference
    if job.sft_share:
        return DPOTrainer, DPOConfig, {"loss_type": [loss, "sft"], "loss_weights": [1.0, job.sft_share], **smoothing}
    return DPOTrainer, DPOConfig, {"loss_type": [loss], **smoothing}


def _masks(batch: Batch) -> tuple[Tensor, Tensor]:
    """(answers, tokens) [2n, length]: what of each row is its answer, and what is no padding. Answers end rows."""
    answers = batch["labels"] != IGNORED
    return answers.long(), (answers.flip(1).cumsum(1).flip(1) > 0).long()


def _with_reference(batch: Batch) -> Batch:
    answers, tokens = _masks(batch)
    chosen, rejected = batch["reference"].chunk(2)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": tokens,
        "completion_mask": answers,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }


def _without_reference(batch: Batch) -> Batch:
    _, tokens = _masks(batch)
    sides = {"input_ids": batch["input_ids"], "attention_mask": tokens, "labels": batch["labels"]}
    return {
        f"{side}_{name}": tensor.chunk(2)[number]
        for number, side in enumerate(("chosen", "rejected"))
        for name, tensor in sides.items()
    }


def _of_answers(batch: Batch) -> Batch:
    answers, tokens = _masks(batch)
    named = {
        "input_ids": batch["input_ids"],
        "attention_mask": tokens,
        "completion_mask": answers,
        "logps": batch["reference"],
    }
    prefixes = {"logps": ("ref_", "ref_KL_")}
    sides = {
        f"{prefixes.get(name, ('', 'KL_'))[number]}{name}": tensor.chunk(2)[number]
        for name, tensor in named.items()
        for number in (0, 1)
    }
    return {**sides, "label": batch["desirable"].bool()}


_CONVERT: dict[str, Callable[[Batch], Batch]] = {
    **dict.fromkeys(("dpo", "hinge", "ipo", "robust"), _with_reference),
    **dict.fromkeys(("orpo", "cpo", "simpo"), _without_reference),
    "kto": _of_answers,
}
"""Loss -> what makes a batch of TRL's trainer from one of ours."""


def _without_mask(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
    return args, {name: value for name, value in given.items() if name != "attention_mask"}


def _plain_log_probs(logits: Tensor, index: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _add_plain_head(model: Any, outputs: tuple[str, ...] = ()) -> None:
    """The interface of TRL's fused head, in PyTorch's own operations."""
    forward = model.forward

    def with_log_probs(*args: Any, fused_lm_head: bool = False, labels: Tensor | None = None, **given: Any) -> Any:
        assert fused_lm_head
        assert labels is not None
        logits, labels = forward(*args, **given).logits[:, :-1], labels[:, 1:]
        scored = labels != IGNORED
        log_probs = _plain_log_probs(logits, labels.clamp(min=0)) * scored
        unread = torch.zeros_like(log_probs)
        return FusedCausalLMOutput(log_probs=log_probs, entropy=unread, mean_logits=unread, is_top1=scored)

    model.forward = with_log_probs

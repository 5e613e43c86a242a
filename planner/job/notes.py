"""Notes for the user who submits a job: which keys are not used, what is created, what is rounded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from planner.keys.adapter import takes_from_base
from planner.keys.lora import has_no_weights
from planner.optimizers.table import OPTIMIZERS
from planner.units import counted

LOW_RATE = 2e-5
"""The largest learning rate that is too small for `method: lsp`."""


def all_warmup(schedule: str, warmup_steps: float, steps: int) -> str | None:
    """Return a note where the warm-up of the learning rate is at least as long as a run of `steps` steps; None for a
    shorter one. `warmup_steps` below 1 is a share of all steps."""
    if schedule == "constant" or warmup_steps < 1 or warmup_steps < steps:
        return None
    run = f"the run has {counted(steps, 'step')}"
    rises = "the rate only rises and never reaches learning_rate"
    return f"warmup_steps is {warmup_steps:g}, and {run}: {rises}; below 1 it is a share of all steps, such as 0.1."


def notes_of(values: Mapping[str, Any], set_keys: Collection[str]) -> tuple[str, ...]:
    """Return the notes on a job with these values (canonical key -> value). `set_keys`: the keys that its file sets
    itself."""
    notes = []
    if values["gradient_checkpointing"] is not None:
        notes.append("gradient_checkpointing: the planner decides it, block by block; the value is not used.")
    if values["per_device_eval_batch_size"] is not None:
        notes.append("per_device_eval_batch_size is not used: evaluation has the batch size of training.")
    if has_no_weights(values["model"]):
        model, seed = values["model"], values["seed"]
        notes.append(f"{model} has no weights: the model starts from random ones under seed {seed}.")
    if values["method"] == "lora" and takes_from_base(begin := values["init_lora_weights"]):
        rank = 2 * values["lora_r"]
        written = f"the adapter is written as LoRA of twice the rank, {rank}, for the model as published"
        slow = "; each decomposition takes seconds to minutes, pissa_niter_16 less" if begin == "pissa" else ""
        notes.append(f"init_lora_weights: {begin} takes a part of the model's own weights; {written}{slow}.")
    if values["method"] == "lora" and values["save_dtype"] is not None:
        notes.append("save_dtype is not used: adapters are written in float32.")
    if values["method"] == "lsp" and (rate := values["learning_rate"]) <= LOW_RATE:
        slow = "so small a rate hardly moves the cores of lsp; its authors train with 1e-4"
        notes.append(f"learning_rate is {rate:g}: {slow}.")
    optimizer = OPTIMIZERS[values["optim"]]
    notes += optimizer.notes(values)
    for other in dict.fromkeys(kind for kind in OPTIMIZERS.values() if kind is not optimizer):
        notes += [f"{key} is not used: it belongs to optim: {other.kind}." for key in other.keys if key in set_keys]
    if values["max_steps"] is not None and "num_train_epochs" in set_keys:
        notes.append(f"max_steps ({values['max_steps']}) decides the length; num_train_epochs is not used.")
    if (steps := values["max_steps"]) is not None:
        notes += filter(None, [all_warmup(values["lr_scheduler_type"], values["warmup_steps"], steps)])
    return tuple(notes)

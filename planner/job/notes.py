"""What to tell the person who submits a job: what is not used, made, or rounded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from planner.job.adapter import takes_from_base
from planner.job.lora import has_no_weights
from planner.job.values import ADAMW_8BIT, MUON
from planner.muon import MATCH_RMS
from planner.units import counted


def all_warmup(schedule: str, warmup_steps: float, steps: int) -> str | None:
    """What to say of a warm-up that a run of so many steps is no longer than; None for others."""
    if schedule == "constant" or warmup_steps < 1 or warmup_steps < steps:
        return None
    run = f"the run has {counted(steps, 'step')}"
    rises = "the rate only rises, and never gets to learning_rate"
    return f"warmup_steps is {warmup_steps:g}, and {run}: {rises}; below 1 it is a share of all steps, such as 0.1."


def notes_of(values: Mapping[str, Any], given: Collection[str]) -> tuple[str, ...]:
    """The notes on a job of these values by canonical key, of which its file gives the keys in `given`."""
    notes = []
    if values["gradient_checkpointing"] is not None:
        notes.append("gradient_checkpointing: the planner decides it, block by block; the value is not used.")
    if values["per_device_eval_batch_size"] is not None:
        notes.append("per_device_eval_batch_size is not used: evaluation has the rows of training.")
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
    if values["optim"] == ADAMW_8BIT:
        exact = "adamw_torch has them in fp32, 6 bytes more a parameter"
        notes.append(f"optim: adamw_8bit rounds AdamW's moments; {exact}.")
    if values["optim"] == MUON:
        adjust = values["muon_adjust_lr_fn"]
        rates = "rates of AdamW" if adjust == MATCH_RMS else "rates of Muon, about 0.02"
        notes.append(f"optim: muon trains matrices, AdamW the rest; muon_adjust_lr_fn: {adjust} is for {rates}.")
        if values["method"] == "full" and values["max_grad_norm"] is not None:
            slow = "what the GPU has no room for waits for the norm on the CPU, which is slow at it"
            notes.append(f"optim: muon with max_grad_norm: {slow}; max_grad_norm: 0 leaves it to the GPU.")
    elif "muon_adjust_lr_fn" in given:
        notes.append("muon_adjust_lr_fn is not used: it is of optim: muon.")
    if values["max_steps"] is not None and "num_train_epochs" in given:
        notes.append(f"max_steps ({values['max_steps']}) decides the length; num_train_epochs is not used.")
    if (steps := values["max_steps"]) is not None:
        notes += filter(None, [all_warmup(values["lr_scheduler_type"], values["warmup_steps"], steps)])
    return tuple(notes)

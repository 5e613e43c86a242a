"""What to tell the person who submits a job: what is not used, made, or rounded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from planner.job.lora import has_no_weights
from planner.job.values import ADAMW_8BIT


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
    if values["optim"] == ADAMW_8BIT:
        exact = "adamw_torch has them in fp32, 6 bytes more a parameter"
        notes.append(f"optim: adamw_8bit rounds AdamW's moments; {exact}.")
    if values["max_steps"] is not None and "num_train_epochs" in given:
        notes.append(f"max_steps ({values['max_steps']}) decides the length; num_train_epochs is not used.")
    return tuple(notes)

"""Which layers get an adapter, of a job's words for them, in those of peft."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from planner.job.lora import ALL_LINEAR, PEFTS_OWN
from planner.job.schema import Job


def targets_of(job: Job) -> Any:
    """`target_modules` of a config of peft's: None is what it has by itself for the model's type. For all linear layers
    and others the first alone, to which `add_others` adds."""
    targets = job.lora_target_modules
    if targets == PEFTS_OWN:
        return None
    if isinstance(targets, tuple):
        return ALL_LINEAR if ALL_LINEAR in targets else list(targets)
    return targets


def add_others(config: Any, model: nn.Module, job: Job) -> None:
    """Let `config`, peft's, which `targets_of` began, name what the job names beside all linear layers of `model`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers  # what get_peft_model does with them alone

    if isinstance(job.lora_target_modules, tuple) and ALL_LINEAR in job.lora_target_modules:
        _maybe_include_all_linear_layers(config, cast(Any, model))
        config.target_modules = {*config.target_modules, *job.lora_target_modules} - {ALL_LINEAR}

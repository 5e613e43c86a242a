"""Translates a job's words for the layers that get an adapter into peft's words."""

from __future__ import annotations

import difflib
import re
from typing import Any, cast

from torch import nn

from planner.errors import Exit, UserError
from planner.job.lora import ALL_LINEAR, PEFTS_OWN
from planner.job.schema import Job


def targets_of(job: Job) -> Any:
    """`target_modules` for a peft config; None: peft's own choice for the model's type. Where a job names all linear
    layers and others, only all linear layers: `add_others` adds the others."""
    targets = job.lora_target_modules
    if targets == PEFTS_OWN:
        return None
    if isinstance(targets, tuple):
        return ALL_LINEAR if ALL_LINEAR in targets else list(targets)
    return targets


def add_others(config: Any, model: nn.Module, job: Job) -> None:
    """Add to peft's `config`, made with `targets_of`, what the job names beside all linear layers of `model`."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers  # as in get_peft_model

    if isinstance(job.lora_target_modules, tuple) and ALL_LINEAR in job.lora_target_modules:
        _maybe_include_all_linear_layers(config, cast(Any, model))
        config.target_modules = {*config.target_modules, *job.lora_target_modules} - {ALL_LINEAR}


def no_such_target(job: Job, model: nn.Module) -> UserError | None:
    """The error where no module in `model` fits the names or the pattern in the job's `lora_target_modules`; None where
    one does."""
    targets, places = job.lora_target_modules, [name for name, _ in model.named_modules()]
    if isinstance(targets, str) and targets not in (ALL_LINEAR, PEFTS_OWN):
        if any(re.fullmatch(targets, place) for place in places):
            return None
        said, meant = targets, ""
    elif isinstance(targets, tuple) and targets and ALL_LINEAR not in targets:
        if any(f".{place}".endswith(f".{name}") for place in places for name in targets):
            return None
        said = ", ".join(targets)
        meant = ", ".join(dict.fromkeys(near for name in targets if (near := near_target(name, model))))
    else:
        return None
    return UserError(
        f"No module of this model {'is called' if isinstance(targets, tuple) else 'matches'} {said}.",
        code="lora-targets", exit_code=Exit.USAGE, numbers=(f"its layers are {', '.join(_weighted(model))}",),
        hint=(f"did you mean {meant}? " if meant else "") + "lora_target_modules: all-linear takes all linear layers",
    )  # fmt: skip


def near_target(name: str, model: nn.Module) -> str | None:
    """The name of a layer of `model` that is nearly `name`; None where there is none."""
    return next(iter(difflib.get_close_matches(name, _weighted(model), n=1)), None)


def _weighted(model: nn.Module) -> list[str]:
    """The last names of all modules that have a matrix of their own, in the model's order."""
    matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
    return list(dict.fromkeys(name.split(".")[-2] for name in matrices if name.count(".")))

"""An ordinary `torch.optim.AdamW` in the engine's terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner.errors import Exit, UserError
from worker.optimizer import AdamW

_SWITCHES = ("amsgrad", "maximize", "differentiable")


def settings_of(optimizer: torch.optim.AdamW, model: nn.Module) -> AdamW:
    """The settings of `optimizer`, which has all trainable parameters of `model` and has not stepped yet. Raises
    UserError "optimizer-not-usable"."""
    if type(optimizer) is not torch.optim.AdamW:
        raise _unusable(f"it is {type(optimizer).__name__}", "use torch.optim.AdamW")
    if optimizer.state:
        raise _unusable("it has moments of steps already", "give a fresh one; load() brings back what save() kept")
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    groups = {names[p]: group for group in optimizer.param_groups for p in group["params"] if p in names}
    if missing := names.values() - groups.keys():
        raise _unusable(
            f"it does not have {min(missing)}, which requires grad",
            "give it every parameter that is trained; requires_grad_(False) freezes the others",
        )
    for switch in _SWITCHES:
        if any(group[switch] for group in groups.values()):
            raise _unusable(f"it has {switch}=True", f"leave {switch} out")
    learning_rate(optimizer)
    betas, eps = _common(optimizer, "betas"), _common(optimizer, "eps")
    decays = {name: float(group["weight_decay"]) for name, group in groups.items() if group["weight_decay"]}
    if len(set(decays.values())) > 1:
        raise _unusable("its groups have more than one weight_decay above 0", "use one, and 0 where nothing decays")
    return AdamW(
        betas=(float(betas[0]), float(betas[1])), eps=float(eps), weight_decay=next(iter(decays.values()), 0.0),
        decay_names=frozenset(decays),
    )  # fmt: skip


def learning_rate(optimizer: torch.optim.AdamW) -> float:
    """The rate that all groups have now. Raises UserError when they differ."""
    return float(_common(optimizer, "lr"))


def _common(optimizer: torch.optim.AdamW, key: str) -> Any:
    values = [group[key] for group in optimizer.param_groups]
    if any(value != values[0] for value in values):
        raise _unusable(f"its groups have different {key}: {', '.join(map(str, values))}", f"give them all one {key}")
    return values[0]


def _unusable(number: str, hint: str) -> UserError:
    return UserError(
        "This optimizer cannot be used.", code="optimizer-not-usable", exit_code=Exit.USAGE, numbers=(number,),
        hint=hint,
    )  # fmt: skip

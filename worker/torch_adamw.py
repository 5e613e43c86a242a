"""An ordinary `torch.optim.AdamW` in the engine's terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner.errors import Exit, UserError
from worker.runtime.step_values import AdamW

_SWITCHES = ("amsgrad", "maximize", "differentiable")


def groups_of(optimizer: torch.optim.AdamW, model: nn.Module) -> tuple[AdamW, ...]:
    """The groups of `optimizer`, which has all trainable parameters of `model`, no others, and has not
    stepped yet.

    Raises UserError "optimizer-not-usable".
    """
    if type(optimizer) is not torch.optim.AdamW:
        raise _unusable(f"it is {type(optimizer).__name__}", "use torch.optim.AdamW")
    if optimizer.state:
        raise _unusable("it has moments of steps already", "give a fresh one; load() brings back what save() kept")
    own = set(model.parameters())
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
    if foreign:
        raise _unusable(
            f"it has a parameter of shape {list(foreign[0].shape)} that is not the model's",
            "train it in an optimizer of its own, or make this one anew of model.parameters()",
        )
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    groups = tuple(_group(group, names) for group in optimizer.param_groups)
    if missing := set(names.values()).difference(*(group.decay_names for group in groups)):
        raise _unusable(
            f"it does not have {min(missing)}, which requires grad",
            "give it every parameter that is trained; requires_grad_(False) freezes the others",
        )
    return groups


def learning_rates(optimizer: torch.optim.AdamW) -> tuple[float, ...]:
    """The rate that each group has now."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups)


def _group(group: dict[str, Any], names: dict[nn.Parameter, str]) -> AdamW:
    for switch in _SWITCHES:
        if group[switch]:
            raise _unusable(f"it has {switch}=True", f"leave {switch} out")
    own = frozenset(names[p] for p in group["params"] if p in names)
    return AdamW(
        betas=(float(group["betas"][0]), float(group["betas"][1])), eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]), decay_names=own, names=own,
    )  # fmt: skip


def _unusable(number: str, hint: str) -> UserError:
    return UserError(
        "This optimizer cannot be used.", code="optimizer-not-usable", exit_code=Exit.USAGE, numbers=(number,),
        hint=hint,
    )  # fmt: skip

"""An ordinary `torch.optim.AdamW` in the engine's terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from planner.errors import Exit, UserError
from worker.runtime.step_values import AdamW

_SWITCHES = ("amsgrad", "maximize", "differentiable")


class TorchAdamW:
    """The settings that an AdamW's groups have now: schedulers change rates, momenta, and whatever else is there."""

    def __init__(self, optimizer: torch.optim.AdamW, model: nn.Module) -> None:
        """`optimizer` has all trainable parameters of `model`, no others, and has not stepped yet.

        Raises UserError "optimizer-not-usable".
        """
        self._optimizer = optimizer
        self._state: object = None
        if type(optimizer) is not torch.optim.AdamW:
            raise _unusable(f"it is {type(optimizer).__name__}", "use torch.optim.AdamW")
        own = set(model.parameters())
        foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        if foreign:
            raise _unusable(
                f"it has a parameter of shape {list(foreign[0].shape)} that is not the model's",
                "train it in an optimizer of its own, or make this one anew of model.parameters()",
            )
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._members = [list(group["params"]) for group in optimizer.param_groups]
        self._names = [frozenset(trained[p] for p in group if p in trained) for group in self._members]
        if missing := set(trained.values()).difference(*self._names):
            raise _unusable(
                f"it does not have {min(missing)}, which requires grad",
                "give it every parameter that is trained; requires_grad_(False) freezes the others",
            )
        self.settings()

    def settings(self) -> tuple[AdamW, ...]:
        """The settings of each group. Raises UserError "optimizer-not-usable" for what the engine cannot do."""
        optimizer = self._optimizer
        if optimizer.state:
            raise _unusable("it has moments of steps already", "give a fresh one; load() brings back what save() kept")
        if self._state is not None and optimizer.state is not self._state:
            raise _unusable(
                "its state was replaced, but the engine has the moments", "load() brings back what save() kept"
            )
        if optimizer._optimizer_step_pre_hooks:
            raise _unusable("it has a hook before its step, which would see no gradients", "remove it")
        groups = optimizer.param_groups
        if [list(map(id, group["params"])) for group in groups] != [list(map(id, own)) for own in self._members]:
            raise _unusable(
                "its groups have other parameters than prepare() was given",
                "restore() the model, and prepare() it with a fresh optimizer that has these groups",
            )
        return tuple(_group(group, names) for group, names in zip(groups, self._names, strict=True))

    def saw_step(self) -> None:
        """A step on no gradients: it does nothing, but schedulers and hooks of the optimizer see one."""
        self._optimizer.step()
        self._state = self._optimizer.state

    def forget(self) -> None:
        """The engine's moments came back: the optimizer's rates may, too, by a `load_state_dict` of its own."""
        self._state = None

    def learning_rates(self) -> tuple[float, ...]:
        """The rate of each group."""
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)


def _group(group: dict[str, Any], names: frozenset[str]) -> AdamW:
    for switch in _SWITCHES:
        if group[switch]:
            raise _unusable(f"it has {switch}=True", f"leave {switch} out")
    if not group["fused"]:
        raise _unusable("it is not fused, and updates are those of the fused one: last bits differ", _FUSED)
    if not group["decoupled_weight_decay"]:
        raise _unusable("its weight decay is not decoupled", "use torch.optim.AdamW as it is")
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):  # as AdamW itself has it, which looks only when it is made
        raise _unusable(f"its betas are {beta1} and {beta2}", "each must be at least 0 and less than 1")
    for key in ("lr", "eps", "weight_decay"):
        if not float(group[key]) >= 0:
            raise _unusable(f"its {key} is {float(group[key])}", "it must be at least 0")
    return AdamW(
        betas=(beta1, beta2), eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), decay_names=names,
        names=names,
    )  # fmt: skip


_FUSED = "torch.optim.AdamW(..., fused=True)"


def _unusable(number: str, hint: str) -> UserError:
    return UserError(
        "This optimizer cannot be used.", code="optimizer-not-usable", exit_code=Exit.USAGE, numbers=(number,),
        hint=hint,
    )  # fmt: skip

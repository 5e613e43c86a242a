"""Translates PyTorch's own optimizers, AdamW alone or beside another one, into the engine's terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from planner.errors import Exit, UserError
from planner.optimizers.base import Group, NotUsable
from planner.optimizers.table import GROUPS

_GROUPS = {getattr(torch.optim, kind.pytorch): kind for kind in GROUPS}
_OTHERS = " or ".join(f"torch.optim.{kind.pytorch}" for kind in GROUPS[1:])
_KNOWN = f"use torch.optim.AdamW(..., fused=True), or beside it {_OTHERS}; a job has optim: adamw_8bit"


class TorchOptimizers:
    """Reads the present settings of PyTorch optimizers' parameter groups in the engine's terms. They are read anew at
    every step, as schedulers may change rates, momenta and any other setting."""

    def __init__(self, optimizers: Optimizer | Sequence[Optimizer], model: nn.Module) -> None:
        """`optimizers` must have all trainable parameters of `model`, each in one of them, and none of another model;
        they must not have stepped yet.

        Raises UserError "optimizer-not-usable".
        """
        self._optimizers = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
        self._states: list[object] = [None] * len(self._optimizers)
        for optimizer in self._optimizers:
            if type(optimizer) not in _GROUPS:
                raise _unusable(f"it is {type(optimizer).__name__}", _KNOWN)
        parameters, groups = set(model.parameters()), self._groups()
        foreign = [p for group in groups for p in group["params"] if p not in parameters]
        if foreign:
            raise _unusable(
                f"it has a parameter of shape {list(foreign[0].shape)} that is not the model's",
                "train it in an optimizer of its own, or make this one anew of model.parameters()",
            )
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._members = [list(group["params"]) for group in groups]
        self._names = [frozenset(trained[p] for p in group if p in trained) for group in self._members]
        counts = Counter(name for names in self._names for name in names)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise _unusable(f"two of them have {min(twice)}", "give each parameter to one optimizer")
        if missing := set(trained.values()).difference(*self._names):
            raise _unusable(
                f"it does not have {min(missing)}, which requires grad",
                "give it every parameter that is trained; requires_grad_(False) freezes the others",
            )
        self.settings()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def settings(self) -> tuple[Group, ...]:
        """The present settings of each parameter group. Raises UserError "optimizer-not-usable" for settings that the
        engine does not support."""
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            if optimizer.state:
                fresh = "give a fresh one; load() brings back what save() kept"
                raise _unusable("it has moments of steps already", fresh)
            if state is not None and optimizer.state is not state:
                raise _unusable(
                    "its state was replaced, but the engine has the moments", "load() brings back what save() kept"
                )
            if optimizer._optimizer_step_pre_hooks:
                raise _unusable("it has a hook before its step, which would see no gradients", "remove it")
        groups = self._groups()
        if [list(map(id, group["params"])) for group in groups] != [
            list(map(id, members)) for members in self._members
        ]:
            raise _unusable(
                "its groups have other parameters than prepare() was given",
                "restore() the model, and prepare() it with a fresh optimizer that has these groups",
            )
        try:
            return tuple(
                kind.from_pytorch(group, names)
                for kind, group, names in zip(self._kinds(), groups, self._names, strict=True)
            )
        except NotUsable as error:
            raise _unusable(error.number, error.hint) from None

    def _kinds(self) -> Iterator[type[Group]]:
        """The kind of each group."""
        for optimizer in self._optimizers:
            yield from [_GROUPS[type(optimizer)]] * len(optimizer.param_groups)

    def kinds(self, model: nn.Module) -> dict[str, Any]:
        """Parameter name -> the kind of optimizer that updates it, for all parameters of `model` in the optimizers'
        groups."""
        groups = self.settings()
        return {
            name: group.optimizer_of(p) for name, p in model.named_parameters() for group in groups if group.has(name)
        }

    def saw_step(self) -> None:
        """Call each optimizer's `step` while no parameter has a gradient. This changes no parameter, but the
        optimizers' schedulers and hooks see a step."""
        for optimizer in self._optimizers:
            optimizer.step()
        self._states = [optimizer.state for optimizer in self._optimizers]

    def forget(self) -> None:
        """Note that the engine has loaded its moments from a checkpoint, so that the user may now call the optimizers'
        `load_state_dict`, which brings their learning rates back."""
        self._states = [None] * len(self._optimizers)

    def learning_rates(self) -> tuple[float, ...]:
        """The present learning rate of each parameter group."""
        return tuple(float(group["lr"]) for group in self._groups())


def _unusable(number: str, hint: str) -> UserError:
    return UserError(
        "This optimizer cannot be used.",
        code="optimizer-not-usable",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint=hint,
    )

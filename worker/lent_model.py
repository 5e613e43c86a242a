"""Checks and prepares a user's model for an engine, restores it afterwards, and checks that it is not changed
meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import Exit, UserError

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Facts = dict[tuple[str, str], object]
"""(name of a module or parameter, what about it) -> value."""


def check_model(model: nn.Module) -> None:
    """Raise UserError "model-not-usable" for a model that the engine cannot train, or for which plain PyTorch would do
    something at a step that the engine does not."""
    elsewhere = next((f"{name} is on {p.device}" for name, p in model.named_parameters() if p.device.type != "cpu"), "")
    if elsewhere:
        raise UserError(
            "The model's weights are not in host memory.",
            code="model-not-usable",
            exit_code=Exit.USAGE,
            numbers=(elsewhere,),
            hint="load it on the CPU; what the plan wants on the GPU is brought there",
        )
    usable = torch.float32, torch.bfloat16
    if other := next(((n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype not in usable), None):
        raise UserError(
            "The model's weights are neither fp32 nor bf16.",
            code="model-not-usable",
            exit_code=Exit.USAGE,
            numbers=(f"{other[0]} is {str(other[1].dtype).removeprefix('torch.')}",),
            hint="model.to(torch.bfloat16), or model.float()",
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise UserError(
            "The model has gradient checkpointing switched on.",
            code="model-not-usable",
            exit_code=Exit.USAGE,
            hint="model.gradient_checkpointing_disable(); the planner decides what is recomputed",
        )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise _unusable(f"{name} has a gradient", "optimizer.zero_grad(): a step begins without gradients")
        if _gradient_hooks(parameter):
            raise _unusable(
                f"{name} has a hook on its gradient", "remove it: gradients can be clipped by max_grad_norm"
            )
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise _unusable(f"{name or 'the model'} has a backward hook", "remove it, or do in forward what it does")


def lend(model: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Prepare the user's model for training by an engine: turn its key-value cache off and move its buffers to
    `device`. Closing `undo` restores the model."""
    _switch_cache_off(model, undo)
    _train(model, undo)
    undo.callback(_move_buffers, model, torch.device("cpu"))
    _move_buffers(model, device)


def _switch_cache_off(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Switch off the model's cache of keys and values, which only generation needs, until `undo`."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        undo.callback(setattr, config, "use_cache", config.use_cache)
        config.use_cache = False


def _train(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Put the model into training mode until `undo`. If it is in training mode already, those of its modules that are
    not stay as they are."""
    for module in model.modules():
        undo.callback(setattr, module, "training", module.training)
    if not model.training:
        model.train()


def keep_weights_in(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Make saving and loading the model's state dict an error until `undo` is closed: while an engine holds the
    weights, the model's own parameters are NaN."""

    def refuse(*_: object) -> None:
        raise UserError(
            "The model's weights are in the engine, not in the model.",
            code="weights-in-engine",
            exit_code=Exit.USAGE,
            hint="engine.save() and load() keep and take all that training needs; restore() gives the model back",
        )

    modules: Any = model.modules()  # torch has no types for these two
    for module in modules:
        undo.callback(module.register_state_dict_pre_hook(refuse).remove)
        undo.callback(module.register_load_state_dict_pre_hook(refuse).remove)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the model's buffers to `device`, since the model's code must find them where they will be."""
    moved: dict[Tensor, Tensor] = {}  # modules may share one
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            moved[buffer] = moved[buffer] if buffer in moved else buffer.to(device)
            setattr(module, name, moved[buffer])


class ModelGuard:
    """Notices when a user changes a model while an engine holds its weights: its modules, parameters, hooks, training
    modes, and the plain values (a dropout rate, the kind of attention) for which the code of its blocks was
    generated."""

    def __init__(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """`blocks`: those modules of `model` that run as generated code. Calls `settle`."""
        self._model = model
        self._inside = {id(part) for block in blocks for part in block.modules()}
        self._facts: Facts = {}
        self.settle()

    def settle(self) -> None:
        """Remember the model's present state as the one to compare with. Modes that are known already are kept, since
        the engine does not change them."""
        modes = {key: value for key, value in self._facts.items() if key[1] == "training"}
        self._facts = {**self._look(), **modes}
        self._alive = [*self._model.modules(), *self._model.parameters()]  # so that no id in the facts is reused

    def check(self, *, steps: bool) -> None:
        """Raise UserError "model-changed" where the model differs from its state at the last `settle`. `steps`: the
        model is about to be trained, so its training modes must be the same, too."""
        now = self._look()
        for key in (*self._facts, *now):
            before, after = (facts.get(key) for facts in (self._facts, now))
            if (before,) != (after,) and (steps or key[1] != "training"):  # in tuples a NaN equals itself
                raise _changed(key[0] or "the model", key[1], before, after)

    def _look(self) -> Facts:
        facts: Facts = {}
        modules = list(self._model.named_modules())
        for name, module in modules:  # these first, since a removed part has no other facts to differ in
            facts[name, "parts"] = tuple((key, id(part)) for key, part in module._modules.items())
            facts[name, "parameters"] = tuple((key, id(parameter)) for key, parameter in module._parameters.items())
        for name, parameter in self._model.named_parameters():
            facts[name, "requires_grad"] = parameter.requires_grad
            facts[name, "gradient"] = parameter.grad is not None
            facts[name, "hook on its gradient"] = _gradient_hooks(parameter)
            facts[name, "dtype"] = parameter.dtype
            facts[name, "value"] = parameter.data_ptr(), parameter._version, tuple(parameter.shape)
        for name, module in modules:
            facts.update({(name, fact): value for fact, value in self._module_facts(module)})
        return facts

    def _module_facts(self, module: nn.Module) -> Iterator[tuple[str, object]]:
        yield "training", module.training
        yield "hooks", tuple(tuple(getattr(module, table)) for table in _HOOKS)
        yield "forward", (id(module.__dict__.get("forward")),)
        yield "buffers", tuple((key, _layout(buffer)) for key, buffer in module._buffers.items())
        if id(module) in self._inside:
            yield from _plain_values(module)
        if "config" in module.__dict__:
            values = _plain_values(module.config)  # save_pretrained writes the dtype anew
            yield from ((f"config.{key}", value) for key, value in values if key != "dtype")


def _plain_values(owner: object) -> Iterator[tuple[str, object]]:
    for key, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, _PLAIN) and key != "training":
            yield key, value


def _layout(buffer: Tensor | None) -> object:
    """A buffer's shape, dtype and device. Its values may change: blocks read their buffers at each call."""
    return None if buffer is None else (tuple(buffer.shape), buffer.dtype, buffer.device)


def _gradient_hooks(parameter: nn.Parameter) -> tuple[int, ...]:
    return *(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())


_AGAIN = "restore() the model, change it, and prepare() it again with a fresh optimizer"


def _changed(name: str, fact: str, before: object, after: object) -> UserError:
    hints = {
        "training": "model.train(), with modules that are to stay in evaluation mode as they were at prepare(); "
        "evaluate() needs no model.eval()",
        "gradient": "optimizer.zero_grad(); what a step adds up is the engine's",
        "hooks": "register hooks before prepare()",
    }
    shown = isinstance(before, _PLAIN) and isinstance(after, _PLAIN)
    number = f"{name}: {fact} is {after}, was {before}" if shown else f"{name} has another {fact}"
    if fact == "gradient":
        number = f"{name} has a gradient"
    return UserError(
        "The model was changed after prepare().",
        code="model-changed",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint=hints.get(fact, _AGAIN),
    )


def _unusable(number: str, hint: str) -> UserError:
    return UserError(
        "The model cannot be trained as it is.",
        code="model-not-usable",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint=hint,
    )

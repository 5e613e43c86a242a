"""Replaces layers that run several times in one forward of a model by modules that each run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.graph.detect import repeated_layers
from planner.graph.repeated_layers import Turns


def take_turns(model: nn.Module, batch: Mapping[str, torch.Tensor], device: torch.device) -> Callable[[], None]:
    """Replace the layers of `model` that run several times in a forward with `batch` by `Turns`, so that each run is a
    module of its own. Returns a function that undoes this."""
    times = Counter(id(module) for module in repeated_layers(model, batch, device))
    slots = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent._modules.items()
        if module is not None and times[id(module)] > 1
    ]
    turns_of = {id(module): Turns(module, times[id(module)]) for _, _, module in slots}
    for parent, name, module in slots:
        parent._modules[name] = turns_of[id(module)]

    def begin(*_arguments: Any) -> None:
        for turns in turns_of.values():
            turns.begin()

    hook = model.register_forward_pre_hook(begin)

    def undo() -> None:
        hook.remove()
        for parent, name, module in slots:
            parent._modules[name] = module

    return undo

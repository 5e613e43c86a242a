"""Replaces a layer that runs several times in one forward by several modules, so that each run is its own block."""

from __future__ import annotations

import copy
import threading
from typing import Any, cast

from torch import nn


class Turns(nn.Module):
    """Replaces a layer that runs `count` times in one forward. Holds `count` modules, the turns, which share the
    layer's parameters and submodules; each call runs the next of them. The search for blocks sees the turns, not this
    module."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.turns = nn.ModuleList([module, *(_twin(module) for _ in range(count - 1))])
        self.now = threading.local()  # each slice runs the model's forward in its own thread

    def __getattr__(self, name: str) -> Any:
        """The attribute of the replaced layer, where this module has none: the model's code may read attributes of its
        layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(cast(nn.ModuleList, super().__getattr__("turns"))[0], name)

    def begin(self) -> None:
        """Let the next call run the first turn, because a forward of the model begins. The forward before may have
        ended in an error."""
        self.now.turn = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's next turn, the first one after the last."""
        turn = getattr(self.now, "turn", 0)
        self.now.turn = (turn + 1) % len(self.turns)
        return self.turns[turn](*args, **kwargs)


def _twin(module: nn.Module) -> nn.Module:
    """A copy of the module with the same parameters, buffers and submodules, but its own forward and hooks."""
    twin = copy.copy(module)
    for key, value in module.__dict__.items():
        if isinstance(value, dict):
            twin.__dict__[key] = value.copy()
    return twin

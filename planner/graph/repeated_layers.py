"""A layer that runs several times in one forward, as so many modules: each run is a block of its own."""

from __future__ import annotations

import copy
import threading
from typing import Any, cast

from torch import nn


class Turns(nn.Module):
    """Stands where a module stood that runs `count` times a forward: each time its next turn runs, which shares the
    module's parameters and parts. Detection sees the turns, not this."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.turns = nn.ModuleList([module, *(_twin(module) for _ in range(count - 1))])
        self.now = threading.local()  # each slice runs the model's forward in its own thread

    def __getattr__(self, name: str) -> Any:
        """What the module has: the model's code may ask its layers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(cast(nn.ModuleList, super().__getattr__("turns"))[0], name)

    def begin(self) -> None:
        """A forward of the model begins; the one before may have ended in an error."""
        self.now.turn = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The next turn's."""
        turn = getattr(self.now, "turn", 0)
        self.now.turn = (turn + 1) % len(self.turns)
        return self.turns[turn](*args, **kwargs)


def _twin(module: nn.Module) -> nn.Module:
    """Another module of the same parameters, buffers and parts, with a forward and hooks of its own."""
    twin = copy.copy(module)
    for key, value in module.__dict__.items():
        if isinstance(value, dict):
            twin.__dict__[key] = value.copy()
    return twin

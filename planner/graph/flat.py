"""Wraps a block as a function from a list of tensors to a tuple of tensors."""

from __future__ import annotations

import torch
from torch import nn

from planner.graph.result import Result, recording
from planner.graph.signature import CallShape, left_in, mappings_of


class Flat(nn.Module):
    """Calls a block with a flat list of tensors, and returns its result as a flat tuple of tensors. `result`: how the
    last call's result nests. `replaced`: names of the buffers for which that call has put another tensor into the
    module. It calls the forward that `module` has when this object is made, without the module's hooks, which run in
    the model's forward."""

    def __init__(self, module: nn.Module, call: CallShape) -> None:
        super().__init__()
        self.module, self.call, self._own = module, call, module.forward
        self.result: Result
        self.replaced: list[str] = []

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.call.nest(tensors)
        mappings = mappings_of(args, kwargs)
        entries = [dict(mapping) for mapping in mappings]
        before = dict(self.module.named_buffers())
        with recording(self.call.recorded) as records:
            value = self._own(*args, **kwargs)
        after = dict(self.module.named_buffers())
        self.replaced = [name for name, buffer in before.items() if after.get(name) is not buffer]
        self.result, results = Result.of(value, records, left_in(mappings, entries), tensors)
        return results

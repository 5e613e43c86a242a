"""Finds the results of a layer that runs by its own code, for micro-batches of a shape that was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.errors import UserError, first_line
from planner.graph.eager import EagerPair
from planner.graph.sample import random_data
from planner.graph.signature import flatten_call

_CPU = torch.device("cpu")


def tried_on_cpu(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str) -> EagerPair:
    """The layer's own code (`EagerPair`) for these arguments, which may be fake, with its results laid out as those of
    a trial forward on random data. The trial runs on the CPU, so it takes no device memory; its weights are zeros,
    which take no host memory. Peaks are not measured. Raises UserError "block-not-usable" if the trial fails."""
    pair = EagerPair(module, args, kwargs, name=name)
    call, tensors = flatten_call(args, kwargs)
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            inputs = [_here(t).requires_grad_(t.requires_grad) for t in tensors]
            tried = EagerPair(module, *call.nest(inputs), name=name)
            tried._autocast = pair._autocast
            weights = [torch.zeros(p.shape, dtype=p.dtype) for p in module.parameters()]
            with torch.no_grad():
                tried.forward([*weights, *map(_here, module.buffers()), *inputs])
        except Exception as error:  # for example, code that only a GPU can run
            raise UserError(
                f"Block {name} cannot be tried on the CPU: {type(error).__name__}: {first_line(error)}",
                code="block-not-usable",
            ) from error
    fakes = pair._fakes.fresh(tried.output_values, pair._device)
    pair.result = tried.result
    pair.output_values = [t.requires_grad_(o.requires_grad) for t, o in zip(fakes, tried.output_values, strict=True)]
    pair.tangent_values = [t for t in pair.output_values if t.requires_grad]
    return pair


def _here(tensor: Tensor) -> Tensor:
    """A copy in host memory, with the data of `tensor`, or random data if it has none."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return random_data(tensor, _CPU)
    return tensor.detach().to(_CPU, copy=True)

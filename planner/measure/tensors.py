"""Describes a model's parameters and buffers for the planner: their bytes, and the bytes of optimizer states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from planner.optimizers.table import ADAMW, NONE, AnyOptimizer
from planner.schedule.chain import Tensor


def describe(
    name: str, p: nn.Parameter, *, trained: bool, tied: bool = False, optimizers: Mapping[str, AnyOptimizer] = NONE
) -> Tensor:
    """Describe the parameter `p` called `name`. A packed parameter (`planner.models.quantized`) counts the elements
    that it `holds`. Where the working copy is narrower than fp32, the optimizer has a master beside its moments.
    `optimizers`: parameter name -> optimizer, for parameters that AdamW does not train."""
    count, size = p.numel(), p.element_size()
    optimizer = optimizers.get(name, ADAMW) if trained else ADAMW
    master = 0 if p.dtype == torch.float32 else 4 * count
    return Tensor(
        name=name,
        elements=getattr(p, "holds", count),
        bytes=count * size,
        gradient_bytes=count * size * trained,
        state_bytes=(sum(optimizer.moment_bytes(count)) + master) * trained,
        trainable=trained,
        optimizer=optimizer,
        row_bytes=p.shape[-1] * size if tied and trained else 0,
    )


def buffer_bytes(model: nn.Module) -> int:
    """The bytes of all buffers; shared ones count once."""
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return sum(storages.values())

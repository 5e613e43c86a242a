"""A model's parameters and buffers in a plan's words: their bytes, and those of the optimizer's states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from planner.optimizers.table import ADAMW, NONE, AnyOptimizer
from planner.schedule.chain import Tensor


def describe(
    name: str, p: nn.Parameter, *, trained: bool, tied: bool = False, optimizers: Mapping[str, AnyOptimizer] = NONE
) -> Tensor:
    """The parameter `p` called `name`; a packed one (`planner.models.quantized`) has as many elements as it `holds`.
    Where the working copy is narrower than fp32, the optimizer has a master beside its moments. `optimizers`: of
    parameters that AdamW does not train."""
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
    """Of all buffers, each once."""
    storages = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    return sum(storages.values())

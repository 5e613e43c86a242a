"""Makes random data for trial runs of a block."""

from __future__ import annotations

import torch
from torch import Tensor


def random_data(value: Tensor, device: torch.device, *, alike: bool = False) -> Tensor:
    """A tensor on `device` with random data, laid out as `value`, which may be fake. Floating point numbers are small,
    so that no operation meets slow special values; whole numbers are 0, a valid token; masks are True. `alike`: all
    rows are equal."""
    memory = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=device)
    if value.dtype.is_floating_point:
        memory.normal_(std=0.02)
    else:
        memory.fill_(value.dtype == torch.bool)
    tensor = memory.as_strided(value.shape, value.stride(), value.storage_offset())
    if alike and tensor.dim() > 1:
        once = tensor  # elements that an expanded dimension repeats are equal already, and must not be written to
        for dim in (d for d, stride in enumerate(tensor.stride()) if stride == 0):
            once = once.narrow(dim, 0, min(1, once.shape[dim]))
        once.copy_(tensor[(0,) * (tensor.dim() - 1)].clone().expand_as(once))
    return tensor

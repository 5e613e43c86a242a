"""Optimizer states by name, as checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planner.cpu.rounded import expand, split

STATE_PARTS = ("exp_avg", "exp_avg_sq", "master")
MATRIX_PARTS = ("momentum_buffer", "master")
"""Of what Muon updates."""
_SCALES = "_scales"


def parts_of(states: Sequence[Tensor], shape: torch.Size, *, matrix: bool = False) -> dict[str, Tensor]:
    """The states of a tensor of this shape by name, as views; moments in 8 bits as their bytes, with blocks' scales.
    `matrix`: Muon's."""
    parts: dict[str, Tensor] = {}
    for part, state in zip(MATRIX_PARTS if matrix else STATE_PARTS, states, strict=False):
        if state.dtype == torch.uint8:
            parts[part + _SCALES], places = split(state, shape.numel())
            parts[part] = places.view(shape)
        else:
            parts[part] = state
    return parts


def expanded(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same in fp32, moments in 8 bits too."""
    found = {part: tensor for part, tensor in parts.items() if not part.endswith(_SCALES)}
    for part, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if (places := found.get(part)) is not None and places.dtype == torch.uint8:
            found[part] = expand(parts[part + _SCALES], places.reshape(-1), signed=signed).view(places.shape)
    return found

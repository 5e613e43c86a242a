"""Lays out all parts of a quantized weight in one tensor of bytes: [numbers | scales]. With double quantization the
scales are bytes themselves: [numbers | scales of the scales | their offset | scales]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

GROUP, GROUPS = 64, 256
"""How many numbers share a scale, and how many scales share a scale of their own, in bitsandbytes."""
_ALIGNED = 16


def places_of_parts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of each part, for parts of these sizes in bytes. Starts are aligned."""
    places: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        start = -(-end // _ALIGNED) * _ALIGNED
        end = start + size
        places.append((start, end))
    return places


def packed_bytes(sizes: Sequence[int], parts: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """The bytes [n] of `parts`, which have these `sizes` in bytes; zeros where `parts` is None."""
    places = places_of_parts(sizes)
    packed = torch.zeros(places[-1][1], dtype=torch.uint8, device=device)
    for (start, end), part in zip(places, parts or (), strict=parts is not None):
        packed[start:end] = part.contiguous().view(torch.uint8).reshape(-1)
    return packed


def sizes_of_4bit(count: int, *, nested: bool) -> list[int]:
    """Bytes of the parts of a weight of `count` elements in 4 bits; `nested`: doubly quantized."""
    scales = -(-count // GROUP)
    groups = -(-scales // GROUPS)
    return [-(-count // 2), *([4 * groups, 4, scales] if nested else [4 * scales])]


def parts_of_4bit(numbers: Tensor, state: Any) -> list[Tensor]:
    """The parts of a weight in 4 bits, in order: from `numbers` and the `state` that bitsandbytes keeps beside them."""
    return [numbers, *([state.state2.absmax, state.offset.reshape(1)] if state.nested else []), state.absmax]


def unpacked_4bit(
    parts: Sequence[Tensor], code: Tensor | None, kind: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Unpack the weight of this `shape`, by bitsandbytes' operations. `code`: the numbers that the bytes of doubly
    quantized scales stand for; None where scales are not quantized. `kind`: nf4 or fp4."""
    operations: Any = torch.ops.bitsandbytes
    numbers, *others = parts
    if code is not None:
        of_scales, offset, scales = others
        scales = operations.dequantize_blockwise.default(
            scales, of_scales.view(torch.float32), code, GROUPS, torch.float32
        ) + offset.view(torch.float32)  # fmt: skip
    else:
        scales = others[0].view(torch.float32)
    weight = operations.dequantize_4bit.default(numbers.view(-1, 1), scales, GROUP, kind, tuple(shape), dtype)
    return cast(Tensor, weight)

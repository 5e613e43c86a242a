"""Muon on matrices: what an update takes in memory and in arithmetic. Light: no torch.

The method is that of Jordan et al. (2024) as `torch.optim.Muon` has it: a momentum is made orthogonal by five steps of
a Newton-Schulz iteration in bf16. The step along it may have the size that one of AdamW would have (Liu et al., 2025,
equation 4). `planner.cpu.muon` does it.
"""

from __future__ import annotations

from typing import Literal, get_args

STEPS = 5
"""Of the iteration."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPS = 1e-7
MOMENTUM = 0.95
Adjust = Literal["match_rms_adamw", "original"]
MATCH_RMS, ORIGINAL = get_args(Adjust)
"""What the learning rate is multiplied by: 0.2 √(longer side), or √(rows / columns) where that is more than 1."""
TRAFFIC_BYTES = 90
"""About what an update reads and writes of each element: in fp32 gradient, momentum and weight, in bf16 the products'
operands."""
CALLS = 30
"""About how many operations it is."""
_ALIGNED = 512


def flops(side: int, elements: int) -> int:
    """Of the products of one update, where the matrix' shorter side is `side`: in each step X Xᵀ, its square, and that
    times X."""
    return STEPS * (4 * side * elements + 2 * side**3)


def scratch_parts(side: int, elements: int, *, narrow: bool) -> tuple[int, ...]:
    """Bytes of what an update needs beside the tensor: the gradient in fp32 where it is `narrow`, the matrix, X Xᵀ and
    what that is multiplied with, all in bf16, and the norm."""
    parts = (4 * elements * narrow, 2 * elements, 2 * side * side, 2 * side * side, 2)
    return tuple(-(-part // _ALIGNED) * _ALIGNED for part in parts)


def scratch_bytes(side: int, elements: int, *, narrow: bool) -> int:
    """All of it."""
    return sum(scratch_parts(side, elements, narrow=narrow))

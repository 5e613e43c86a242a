"""Muon's update of one matrix, on any device: what `torch.optim.Muon` computes, bit for bit, in memory of known size.

Each operation is that of PyTorch's, on tensors laid out as its own are, since last bits depend on that; only where
results go is ours. So the matrix is never cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.muon import COEFFICIENTS, EPS, MATCH_RMS, STEPS, scratch_parts

_A, _B, _C = COEFFICIENTS


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix to update, with everything the update reads, on one device. All are [rows, columns] and contiguous.

    `master` (fp32) is what the optimizer works on, `work` the copy that computes: `master` itself where it is as wide.
    """

    name: str
    weight_decay: float
    work: Tensor
    master: Tensor
    momentum: Tensor
    gradient: Tensor


def update(
    matrix: Matrix, *, learning_rate: float, momentum: float, adjust: str = MATCH_RMS, coefficient: Tensor | None = None
) -> None:  # fmt: skip
    """One step. `adjust`: torch's `adjust_lr_fn`; `coefficient`: what the gradient is multiplied by first. An fp32
    gradient is lost."""
    shape, master = matrix.gradient.shape, matrix.master
    side, elements = min(shape), shape.numel()
    narrow = matrix.gradient.dtype != torch.float32
    sizes = scratch_parts(side, elements, narrow=narrow)
    scratch = torch.split(torch.empty(sum(sizes), dtype=torch.uint8, device=master.device), list(sizes))
    wide = _view(scratch[0], torch.float32, shape).copy_(matrix.gradient) if narrow else matrix.gradient
    if coefficient is not None:
        wide.mul_(coefficient)
    matrix.momentum.lerp_(wide, 1 - momentum)
    wide.lerp_(matrix.momentum, momentum)  # Nesterov's
    tall = shape[0] > shape[1]
    flat = shape[::-1] if tall else shape
    found = _orthogonal(_view(scratch[1], torch.bfloat16, shape).copy_(wide), wide, scratch[2:])
    step = wide.view(flat).copy_(found)  # as wide as the master, with the strides of PyTorch's
    master.mul_(1 - learning_rate * matrix.weight_decay)
    master.add_(step.T if tall else step, alpha=-learning_rate * _ratio(shape, adjust))
    if matrix.work is not master:
        matrix.work.copy_(master)


def _ratio(shape: torch.Size, adjust: str) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(shape)) if adjust == MATCH_RMS else math.sqrt(max(1, rows / columns))


def _orthogonal(matrix: Tensor, spare: Tensor, scratch: tuple[Tensor, ...]) -> Tensor:
    """What the Newton-Schulz iteration makes of a bf16 matrix, in its memory, lying: [shorter, longer]. `spare` has
    more memory than the matrix takes."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    square = torch.Size([x.shape[0], x.shape[0]])
    gram, factor = (_view(part, torch.bfloat16, square) for part in scratch[:2])
    norm = _view(scratch[2], torch.bfloat16, torch.Size([]))
    x.div_(torch.linalg.vector_norm(x, out=norm).clamp_(min=EPS))
    home, other = (_view(memory.view(-1).view(torch.uint8), torch.bfloat16, x.shape) for memory in (matrix, spare))
    for _ in range(STEPS):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=_B, alpha=_C, out=factor)
        x = torch.addmm(x, factor, x, beta=_A, out=other)
        home, other = other, home
    return x if home.data_ptr() == matrix.data_ptr() else other.copy_(x)


def _view(memory: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """The first of the memory's bytes as a tensor."""
    return memory.view(dtype)[: shape.numel()].view(shape)

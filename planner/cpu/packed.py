"""Packs the optimizer states of bf16 weights into ten bytes per parameter instead of twelve, without loss.

A bf16 working copy is the upper half of its fp32 master, rounded to the nearest. So the master follows from the
working copy, the master's lower half, and one bit: whether the rounding went up. The sign of the second moment, which
is never negative, holds that bit. Thus exp_avg, exp_avg_sq and `low` (int16) are stored in place of exp_avg,
exp_avg_sq and master. The functions here convert whole tensors with PyTorch, where masters are saved and loaded; the
kernel in adamw.c updates packed states as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE = 1 << 19  # elements at a time: few enough that intermediate results stay in the cache
_SIGN = 1 << 31


def unpack(work: Tensor, low: Tensor, exp_avg_sq: Tensor, master: Tensor) -> None:
    """Write the fp32 `master` from the packed states: the bf16 `work`, the int16 `low`, and the sign of `exp_avg_sq`,
    which is made positive again. All have the same number of elements. `low` may be the second half of the memory of
    `master`: it is read before it is overwritten."""
    for part in _pieces(master):
        _join(*(tensor.view(-1)[part] for tensor in (work, low, exp_avg_sq, master)))


def pack(master: Tensor, work: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    """Pack the fp32 `master`: write its lower halves to `low` (int16), `master` rounded to bf16 to `work`, and into
    the sign of `exp_avg_sq` whether the rounding went up."""
    for part in reversed(_pieces(master)):
        _part(*(tensor.view(-1)[part] for tensor in (master, work, low, exp_avg_sq)))


def _pieces(tensor: Tensor) -> list[slice]:
    return [slice(start, start + _PIECE) for start in range(0, tensor.numel(), _PIECE)]


def _join(work: Tensor, low: Tensor, exp_avg_sq: Tensor, master: Tensor) -> None:
    upper = work.view(torch.int16).int()
    upper += exp_avg_sq.view(torch.int32) >> 31  # one less where it was rounded up
    upper <<= 16
    upper |= low.int() & 0xFFFF
    exp_avg_sq.abs_()
    master.view(torch.int32).copy_(upper)


def _part(master: Tensor, work: Tensor, low: Tensor, exp_avg_sq: Tensor) -> None:
    bits = master.view(torch.int32).clone()
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    work.view(torch.int16).copy_(rounded)
    low.copy_(bits)
    upper ^= rounded  # odd where it was rounded up, which adds one
    exp_avg_sq.abs_()
    exp_avg_sq.view(torch.int32).bitwise_or_((upper & 1).mul_(-_SIGN))

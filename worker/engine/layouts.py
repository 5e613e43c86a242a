"""Describes how tensors lie in memory, and copies between tensors of the same layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How a tensor lies in memory: its dtype, shape and strides."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The number of bytes from the first to the last element, gaps included."""
        return span(self.shape, self.stride) * self.dtype.itemsize

    def within(self, part: Tensor) -> Tensor:
        """A tensor of this dtype, shape and strides over the memory of `part`, a tensor of `bytes` bytes."""
        return part.view(self.dtype).as_strided(self.shape, self.stride)


def layouts_of(tensors: Sequence[Tensor]) -> list[Layout]:
    """The dtype, shape and strides of each tensor."""
    return [Layout(t.dtype, t.shape, t.stride()) for t in tensors]


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The number of elements from the first to the last of a tensor with this shape and these strides, gaps
    included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor of `sources` to that of `targets` with the same shape and strides, in one call, since Python may
    switch threads at each call.

    The memory of a tensor with gaps is copied as it lies, gaps included: otherwise PyTorch would go through a tensor
    without gaps, and on the host copy from it before the device has filled it."""
    if not all(source.is_contiguous() for source in sources):
        lengths = [0 if s.is_contiguous() else _span_with_gaps(s.shape, s.stride()) for s in sources]
        targets, sources = (
            [t.as_strided((n,), (1,)) if n else t for t, n in zip(tensors, lengths, strict=True)]
            for tensors in (targets, sources)
        )
    if sources:
        torch._foreach_copy_(targets, sources, non_blocking=True)


@functools.lru_cache(maxsize=1024)
def _span_with_gaps(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """The `span` of a tensor that has gaps or overlapping elements; 0 for any other."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return span(shape, stride)
        expected *= size
    return 0

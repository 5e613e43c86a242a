"""How tensors lie in memory, and copies between tensors that lie alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How a tensor lies."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """From the first to the last one of its elements, what is in gaps included."""
        return span(self.shape, self.stride) * self.dtype.itemsize

    def within(self, part: Tensor) -> Tensor:
        """The tensor that lies so in `bytes` bytes."""
        return part.view(self.dtype).as_strided(self.shape, self.stride)


def layouts_of(tensors: Sequence[Tensor]) -> list[Layout]:
    """That of each."""
    return [Layout(t.dtype, t.shape, t.stride()) for t in tensors]


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of such a tensor, those in gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to the target that lies like it, in one call: threads change at each.

    Where a tensor has gaps its memory goes over as it lies, gaps and all: otherwise PyTorch would go through a tensor
    without gaps, and on the host empty that before the device has filled it.
    """
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
    """The `span` of a tensor that has gaps, or the same element at two places; 0 for one that has neither."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return span(shape, stride)
        expected *= size
    return 0

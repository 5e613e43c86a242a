"""Gradients that arrive laid out otherwise than a block's results.

What the frame does with a result may turn its gradient round or expand it. Autograd's code looks at that: it copies
where a view is not possible, or where a kernel wants its memory in order. So a block is traced once more for such
gradients: an operation whose backward gives them the layout in which they will come stands behind each result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

Layout = tuple[tuple[int, ...], ...]
"""The strides of each gradient; of dimensions of one element, which say nothing, zero."""


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """How `tensors` are laid out."""
    return tuple(
        tuple(stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)) for t in tensors
    )


def arriving(results: Sequence[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    """`results`, those that have a gradient as aliases, whose gradients get the strides of `layout` in a trace."""
    strides = iter(layout)
    alias = cast(Any, _Alias.apply)
    return tuple(alias(t, next(strides)) if t.requires_grad else t for t in results)


def is_arrival(node: fx.Node) -> bool:
    """The node gives the gradient, its first argument, the strides in which it will come."""
    return node.target is torch.ops.offmate.arrival.default


@torch.library.custom_op("offmate::arrival", mutates_args=())
def _arrival(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    raise AssertionError("it is traced, and never runs")


@_arrival.register_fake
def _(gradient: Tensor, strides: Sequence[int]) -> Tensor:
    return gradient.new_empty_strided(gradient.shape, strides)


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.strides = strides
        return cast(Tensor, torch.ops.aten.alias.default(result))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.offmate.arrival.default(gradient, ctx.strides), None

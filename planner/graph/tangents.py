"""Gradients that arrive laid out otherwise than a block's results, and those of its arguments that are there before.

What the frame does with a result may turn its gradient round or expand it. Autograd's code looks at that: it copies
where a view is not possible, or where a kernel wants its memory in order. So a block is traced once more for such
gradients: an operation whose backward gives them the layout in which they will come stands behind each result.

An argument may be read by others, too: later blocks, or the model's code after the block (a skip of a U-Net, a residual
around a layer, what an encoder made). What they have made of its gradient is there before the block's backward, and
autograd adds what the block makes of it one by one to that. So the block's code begins with it: in the trace the
argument has one more reader, the last one, whose backward gives the gradient that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

Strides = tuple[int, ...]
"""Of dimensions of one element, which say nothing, zero."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The strides of each gradient of a block's results; of the arguments whose gradients have begun elsewhere, each
    with its strides."""

    results: tuple[Strides, ...]
    begun: tuple[tuple[int, Strides], ...] = ()


def layout_of(tensors: Sequence[Tensor], begun: Mapping[int, Tensor] | None = None) -> Layout:
    """How `tensors`, and gradients that have `begun` (by argument), are laid out."""
    others = tuple((index, _strides(gradient)) for index, gradient in sorted((begun or {}).items()))
    return Layout(tuple(map(_strides, tensors)), others)


def _strides(tensor: Tensor) -> Strides:
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def begun_gradients(inputs: Sequence[Tensor], layout: Layout | None) -> list[Tensor]:
    """Without data, the gradients of `inputs` (fake) that are there before."""
    begun = layout.begun if layout is not None else ()
    return [inputs[i].detach().new_empty_strided(inputs[i].shape, strides) for i, strides in begun]


def beginning(arguments: Sequence[Tensor], layout: Layout, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """In a trace, the last readers of the arguments whose `gradients` have begun elsewhere."""
    reader = cast(Any, _Reader.apply)
    return tuple(reader(arguments[i], gradient) for (i, _), gradient in zip(layout.begun, gradients, strict=True))


def arriving(results: Sequence[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    """`results`, those that have a gradient as aliases, whose gradients get the strides of `layout` in a trace."""
    strides = iter(layout.results)
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


class _Reader(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, argument: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return argument.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, strides: tuple[int, ...]) -> Tensor:
        ctx.strides = strides
        return cast(Tensor, torch.ops.aten.alias.default(result))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.ops.offmate.arrival.default(gradient, ctx.strides), None

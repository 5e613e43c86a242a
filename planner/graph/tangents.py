"""Lets a block be traced for the gradients that its backward will really get: for their strides, and for arguments
whose gradient other readers have partly computed before.

The model's code between blocks may transpose or expand the gradient of a block's result. What autograd does depends on
the layout: it copies where a view is not possible, or where a kernel wants its memory in order. So a block is traced
once more for such gradients: in the trace each result goes through an alias whose backward gives the gradient the
strides with which it will arrive.

An argument may have other readers, too: later blocks, or the model's code after the block (a skip of a U-Net, a
residual around a layer, the output of an encoder). Their part of its gradient exists before the block's backward, and
autograd adds the block's parts to it one by one. So the block's code starts from that part: in the trace the argument
has one more reader, the last one, whose backward returns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

Strides = tuple[int, ...]
"""The strides of a tensor, 0 for dimensions of one element, whose strides do not matter."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The strides of the gradients that a block's backward gets. `results`: the strides of each result's gradient.
    `begun`: (argument's index, strides) for each argument whose gradient other readers have partly computed before."""

    results: tuple[Strides, ...]
    begun: tuple[tuple[int, Strides], ...] = ()


def layout_of(tensors: Sequence[Tensor], begun: Mapping[int, Tensor] | None = None) -> Layout:
    """The strides of `tensors`, the gradients of a block's results, and of `begun`: argument's index -> the part of
    its gradient that other readers have computed before."""
    others = tuple((index, _strides(gradient)) for index, gradient in sorted((begun or {}).items()))
    return Layout(tuple(map(_strides, tensors)), others)


def _strides(tensor: Tensor) -> Strides:
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def begun_gradients(inputs: Sequence[Tensor], layout: Layout | None) -> list[Tensor]:
    """Fake tensors for the gradients in `layout.begun`: those of arguments that other readers have partly computed
    before the block's backward. `inputs`: the block's (fake) arguments."""
    begun = layout.begun if layout is not None else ()
    return [inputs[i].detach().new_empty_strided(inputs[i].shape, strides) for i, strides in begun]


def beginning(arguments: Sequence[Tensor], layout: Layout, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Adds to a trace one more reader, the last, of each argument in `layout.begun`. In backward this reader returns
    the argument's one of `gradients`, the part that others have computed before; autograd then adds the block's own
    parts to it."""
    reader = cast(Any, _Reader.apply)
    return tuple(reader(arguments[i], gradient) for (i, _), gradient in zip(layout.begun, gradients, strict=True))


def arriving(results: Sequence[Tensor], layout: Layout) -> tuple[Tensor, ...]:
    """Replaces each of `results` that requires grad by an alias: in the traced backward its gradient has the strides
    that `layout` gives, instead of those of the result."""
    strides = iter(layout.results)
    alias = cast(Any, _Alias.apply)
    return tuple(alias(t, next(strides)) if t.requires_grad else t for t in results)


def is_arrival(node: fx.Node) -> bool:
    """Whether `node` is the operation that gives a gradient (its first argument) the strides with which it will
    arrive; `arriving` puts this operation into the traced backward."""
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

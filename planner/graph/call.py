"""A block in the frame's autograd graph, which is cut around it.

Forward runs inside the model's own forward. Backward does not run inside autograd: a plain loop computes each block's
backward and drives the frame's pieces between the blocks through gradient edges, which hold no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from planner.graph.pair import Pair


class BlockCall:
    """One block on one slice, from its forward to its backward. Subclasses say how both are computed.

    tangents    gradients of the differentiable outputs, None until they have arrived from the frame
    """

    def __init__(self, pair: Pair, tensors: Sequence[Tensor]) -> None:
        """`tensors`: the tensor arguments of the call, as the frame gives them."""
        self.pair = pair
        self.edges: list[GradientEdge | None] = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
        self.node: Node | None = None
        self.tangents: list[Tensor] | None = None

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Outputs of the block for its (detached) tensor arguments. The list is the subclass's to empty."""
        raise NotImplementedError

    def zeros(self, output: Tensor) -> Tensor:
        """A zero gradient shaped like `output`, the traced (fake) value of an output."""
        return torch.zeros(output.shape, dtype=output.dtype, device=output.device)

    def enter(self, tensors: Sequence[Tensor], anchor: Tensor) -> Any:
        """Run `forward` as a node of the frame's graph and nest its outputs as the block would.

        `anchor`: a scalar that requires grad, so that a block without a differentiable argument has a node too.
        """
        result = self.pair.joint.result
        apply = cast(Callable[..., tuple[Tensor, ...]], _Cut.apply)
        outputs = apply(self, anchor, *(t.detach() for t in tensors))
        self.node = next((o.grad_fn for o, d in zip(outputs, result.differentiable, strict=True) if d), None)
        return result.nest(outputs)

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of all outputs; a missing one is zero, as autograd would make it."""
        result, outputs = self.pair.joint.result, self.pair.joint.outputs
        self.tangents = [
            g if g is not None else self.zeros(o.meta["val"])
            for g, o, d in zip(grads, outputs, result.differentiable, strict=True)
            if d
        ]

    def take_tangents(self) -> list[Tensor]:
        """The tangents, which the call forgets."""
        tangents, self.tangents = self.tangents, None
        assert tangents is not None, "no gradient has arrived"
        return tangents

    def pass_on(self, grads: list[Tensor | None], before: BlockCall | None) -> None:
        """Send the gradients of the arguments through the frame's piece of graph, to the block `before` and to the
        frame's weights. Empties `grads`."""
        pairs = [(e, g) for e, g in zip(self.edges, grads, strict=True) if e is not None and g is not None]
        grads.clear()
        if not pairs:
            return
        edges, gradients = map(list, zip(*pairs, strict=True))
        pairs.clear()
        if len(edges) == 1 and before is not None and edges[0].node is before.node:
            # Nothing of the frame lies between: no trip through autograd.
            outputs: list[Tensor | None] = [None] * before.pair.n_outputs
            outputs[edges[0].output_nr] = gradients.pop()
            before.arrive(outputs)
        else:
            torch.autograd.backward(edges, gradients)

    def clear(self) -> None:
        """Break the cycle call -> node -> call, which runs through C++, where no collector sees it."""
        self.__dict__.clear()


class _Cut(torch.autograd.Function):
    """The block's node: forward computes, backward only hands the gradients to the call."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        given = list(tensors)
        del tensors
        outputs = tuple(call.forward(given))
        differentiable = call.pair.joint.result.differentiable
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, differentiable, strict=True) if not d])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        call, ctx.call = ctx.call, None
        call.arrive(grads)
        return (None, None, *(None for _ in call.edges))


def run_slice(
    model: nn.Module, batch: Mapping[str, Tensor], model_kwargs: Mapping[str, Any], device: torch.device
) -> Tensor:
    """The model's own forward on one slice, and backward from the loss to the head. Returns the loss, detached.

    The slice's batch is copied to the device as it begins and dies as the forward ends.
    """
    loss: Tensor = model(
        **{name: t.to(device, copy=True, non_blocking=True) for name, t in batch.items()}, **model_kwargs
    ).loss
    value = loss.detach()
    with torch.autocast(device.type, enabled=False):  # plain code leaves autocast before backward
        loss.backward()  # type: ignore[no-untyped-call]
    return value

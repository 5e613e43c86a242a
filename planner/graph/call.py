"""Runs a block inside the autograd graph of the frame (the model's own code outside the blocks), and cuts the graph
there.

A block's forward runs inside the model's own forward. Its backward does not run inside autograd: a plain loop computes
each block's backward and, between two blocks, lets autograd run the frame's part of the graph. Gradient edges mark
where each part begins; they hold no data.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from planner.errors import Exit, UserError
from planner.graph.interface import BlockCode
from planner.graph.pieces import Due, End, Pieces, key_of
from planner.graph.result import Mappings
from planner.graph.tangents import Layout, layout_of

Given = Pieces["FrameCall"]
"""The tensors that the blocks of one slice (a micro-batch) got as arguments."""


class FrameCall:
    """One call of a block for one slice (a micro-batch), as the frame's autograd graph sees it. The frame is the
    model's own code outside the blocks. The call lives from its forward to its backward.

    tangents    gradients of the block's outputs; None until the first arrives from the frame. They may arrive in
                several parts (from the loss and from the next block): each output has the sum of what has arrived
    later       argument -> the part of its gradient that comes from later readers: later blocks, or the model's code
                after the block (a residual around it). The block's backward adds its own part to this one
    shares      argument -> the earlier call that got the same tensor, and the argument's index there. Only for tensors
                that no call owns as a node of the graph: views, and parameters of the frame
    layout      the strides of the gradients that backward got
    """

    def __init__(self, pair: BlockCode, tensors: Sequence[Tensor], pieces: Given | None = None) -> None:
        """`tensors`: the tensor arguments of the call, as the frame passes them. `pieces`: the arguments of earlier
        blocks for the same slice; the call adds its own."""
        self.pair = pair
        self.edges: list[GradientEdge | None] = [get_gradient_edge(t) if t.requires_grad else None for t in tensors]
        self.pieces: Given = Pieces() if pieces is None else pieces
        self.number = self.pieces.enter(self.edges)
        self.shares: dict[int, tuple[FrameCall, int]] = {}
        for index, edge in enumerate(self.edges):
            if edge is not None and self.pieces.owner(edge) is None:
                key = key_of(edge)  # the call keeps the node
                if key in self.pieces.given:
                    self.shares[index] = self.pieces.given[key]
                self.pieces.given[key] = self, index
        self.later: dict[int, Tensor] = {}
        self.layout: Layout | None = None
        self._kept: list[Node] = []
        self.node: Node | None = None
        self.tangents: list[Tensor | None] | None = None

    def zeros(self, output: Tensor) -> Tensor:
        """A zero gradient with the shape, dtype and device of `output`, a traced (fake) output."""
        return torch.zeros(output.shape, dtype=output.dtype, device=output.device)

    def arrive(self, grads: Sequence[Tensor | None]) -> None:
        """Take one gradient per output, None where none has come. A further gradient of an output is added to the one
        before."""
        if self.tangents is None:
            self.tangents = list(grads)
            return
        for i, new in enumerate(grads):
            if new is not None:
                old = self.tangents[i]
                self.tangents[i] = new if old is None else self.sum(i, old, new)

    def keep(self, tensors: Sequence[Tensor], anchor: Tensor) -> None:
        """Replace each argument that the frame computed by a node that leads to this call. From now on, gradients from
        later readers of such an argument come to the call (`later`) and not to the operation that made it."""
        apply = cast(Callable[..., Tensor], _Given.apply)
        for index, (tensor, edge) in enumerate(zip(tensors, self.edges, strict=True)):
            if edge is None or tensor.is_leaf or tensor._is_view() or self.pieces.owner(edge) is not None:
                continue
            with _unsafe_preserve_version_counter(tensor):  # its values stay
                tensor.detach_()
                node = apply(self, index, anchor, tensor).grad_fn
            assert node is not None
            self._kept.append(node)  # keeps the node alive: `pieces` knows it by its id
            self.pieces.made(self.number, node, self, itself=False)

    def sum(self, output: int, old: Tensor, new: Tensor) -> Tensor:
        """The sum of the gradient `old` of an output and a further one, `new`. `output`: the output's index."""
        return old + new

    def complete(self) -> None:
        """Replace missing gradients of the block's outputs by zeros, as autograd would. Call it when no more gradients
        can arrive."""
        if self.tangents is not None:
            outputs, differentiable = self.pair.output_values, self.pair.result.differentiable
            self.tangents = [
                self.zeros(o) if d and g is None else g
                for g, o, d in zip(self.tangents, outputs, differentiable, strict=True)
            ]

    def take_tangents(self) -> list[Tensor]:
        """The gradients that the block's backward starts from: first those of its differentiable outputs, then the
        parts of its arguments' gradients that other readers have computed already. The list is empty if no output is
        differentiable (everything up to this block is frozen).

        The call drops its references to them. Afterwards `pair` is the code for gradients with these strides.
        """
        differentiable = self.pair.result.differentiable
        if not any(differentiable):
            return []
        self.complete()
        tangents, self.tangents = self.tangents, None
        assert tangents is not None, "no gradient has arrived"
        taken = [g for g, d in zip(tangents, differentiable, strict=True) if d and g is not None]
        begun = {
            index: gradient
            for index, edge in enumerate(self.edges)
            if edge is not None
            and self.pair.input_grad_values[index] is not None
            and (gradient := self._take_begun(index, edge)) is not None
        }
        self.layout = layout_of(taken, begun)
        self.pair = self.pair.for_tangents(self.layout)
        return [*taken, *(begun[index] for index in sorted(begun))]

    def _take_begun(self, index: int, edge: GradientEdge) -> Tensor | None:
        """The part of an argument's gradient that other readers have computed before the block's backward; None if
        there is none."""
        maker = self.pieces.owner(edge)
        if maker is not None and index not in self.later and self.pieces.begins(self.number, edge):
            return maker.take_arrived(edge)
        return self.later.pop(index, None)

    def take_arrived(self, edge: GradientEdge) -> Tensor | None:
        """The gradient that has arrived so far at `edge`, a node of this call; None if none has. The call drops its
        reference. Raises RuntimeError if the block has already run backward."""
        if not self.__dict__:
            raise RuntimeError("a gradient comes to a block that has run backward")
        argument = getattr(edge.node, "argument", None)
        if argument is not None:
            return self.later.pop(argument, None)
        if self.tangents is None:
            return None
        gradient, self.tangents[edge.output_nr] = self.tangents[edge.output_nr], None
        return gradient

    def pass_on(self, grads: list[Tensor | None], before: FrameCall | None) -> None:
        """Send the gradients of the arguments backward through the frame's graph, to the block `before` and to the
        frame's weights. A part of the graph runs only when all its gradients are there (`Pieces`). Empties `grads`."""
        pairs, ends = self.pieces.due(self.number, list(self._own(grads)))
        grads.clear()
        if len(pairs) == 1 and before is not None and pairs[0][0].node is before.node:
            # The frame has no operation between the two blocks: autograd is not needed.
            edge, gradient = pairs.pop()
            outputs: list[Tensor | None] = [None] * before.pair.n_outputs
            outputs[edge.output_nr] = gradient
            before.arrive(outputs)
        elif pairs:
            run_backward(self.pieces, pairs, ends)
        if before is not None:
            before.complete()

    def _own(self, grads: Sequence[Tensor | None]) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Yields (edge, gradient) for each argument's gradient that goes on from this call, with the parts from later
        readers added. If an earlier call got the same tensor, the gradient is handed to that call instead."""
        for index, (edge, grad) in enumerate(zip(self.edges, grads, strict=True)):
            total = self.later.pop(index, None)  # set only if the block's code did not start from it
            if grad is not None:
                total = grad if total is None else total + grad
            if edge is None or total is None:
                continue
            if index in self.shares:
                call, argument = self.shares[index]
                call.later[argument] = total
            else:
                yield edge, total

    def clear(self) -> None:
        """Drop all attributes, to break the cycle call -> node -> call. It goes through C++, where Python's collector
        does not see it."""
        self.__dict__.clear()


def run_backward(pieces: Given, pairs: list[Due], ends: Sequence[End]) -> None:
    """Run autograd over parts of the frame's graph, from `pairs` of edge and gradient. Empties `pairs`. `ends`: the
    tensors at which these parts stop; the gradients that later readers have already sent there are added."""
    edges, gradients = map(list, zip(*pairs, strict=True))
    pairs.clear()
    for end in ends:
        owner = pieces.owner(end.edge)
        if owner is not None and (arrived := owner.take_arrived(end.edge)) is not None:
            edges.append(end.edge)
            gradients.append(arrived)
    torch.autograd.backward(edges, gradients)


class BlockCall(FrameCall, ABC):
    """A call of a block that computes its outputs in the frame's forward. Subclasses say how."""

    @abstractmethod
    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Compute the block's outputs for its detached tensor arguments, `tensors`. A subclass may empty that list."""

    def enter(self, tensors: Sequence[Tensor], mappings: Mappings, anchor: Tensor) -> Any:
        """Run `forward` as one node of the frame's autograd graph. Returns the outputs, nested as the block's own
        result.

        `mappings`: the dictionaries among the block's arguments; what the block puts into them is put there. `anchor`:
        a scalar that requires grad, so that a block without a differentiable argument gets a node too.
        """
        apply = cast(Callable[..., tuple[Tensor, ...]], _Cut.apply)
        # Modes that watch the frame's operations must not see these; they may see a block's own code.
        with torch._C.DisableTorchFunction():
            detached = [t.detach() for t in tensors]
        outputs = apply(self, anchor, *detached)
        del detached
        result = self.pair.result
        with torch._C.DisableTorchFunction():
            self.node = next((o.grad_fn for o, d in zip(outputs, result.differentiable, strict=True) if d), None)
            if self.node is not None:
                self.pieces.made(self.number, self.node, self)
            self.keep(tensors, anchor)
        return result.deliver(outputs, tensors, mappings)


class _Given(torch.autograd.Function):
    """An autograd function that marks a tensor as a block's argument: gradients from those who read the tensor later
    go to the block's call."""

    @staticmethod
    def forward(ctx: Any, call: FrameCall, argument: int, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.call, ctx.argument = call, argument
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        later, argument = ctx.call.later, ctx.argument
        later[argument] = later[argument] + gradient if argument in later else gradient
        return None, None, None, None


class _Cut(torch.autograd.Function):
    """An autograd function for a whole block: its forward computes the block, its backward only hands the gradients to
    the call."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        values = list(tensors)
        del tensors
        # The block's code contains its casts: autocast must not add any.
        with autocast_off(anchor.device.type):
            outputs = tuple(call.forward(values))
        differentiable = call.pair.result.differentiable
        ctx.mark_non_differentiable(*[o for o, d in zip(outputs, differentiable, strict=True) if not d])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.call.arrive(grads)  # more may arrive later: the loss may read a block's result too
        return (None, None, *(None for _ in ctx.call.edges))


def autocast_off(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is off for `device_type`. Where it is off already, entering costs next to nothing."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()


def refuse_autocast(device: torch.device) -> None:
    """Raise UserError if autocast is on for `device`. Autocast would not reach the threads that run the slices
    (micro-batches), and would keep cast copies of weights after they were updated."""
    if torch.is_autocast_enabled(device.type):
        dtype = str(torch.get_autocast_dtype(device.type))
        raise UserError(
            "The engine was called inside torch.autocast.",
            code="autocast-outside",
            exit_code=Exit.USAGE,
            hint=f'let the model enter it: model.forward = torch.autocast("{device.type}", {dtype})(model.forward)',
        )


def loss_of(result: Any) -> Tensor:
    """The loss in what a model's forward returned: its `loss`, or the whole result. Raises UserError if that is not a
    tensor of one element."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UserError(
            "The model's forward gives no loss.",
            code="no-loss",
            exit_code=Exit.USAGE,
            numbers=(f"it gives {type(result).__name__}",),
            hint='have it return the loss, a scalar, or something with a loss (result.loss, result["loss"])',
        )
    return loss


def value_of(result: Any) -> Tensor:
    """What is kept of a forward, detached: the loss, a tensor of one element; or, if the result has `figures` [n], the
    loss followed by them, [1 + n] in fp32. Raises UserError as `loss_of`."""
    loss, figures = loss_of(result).detach(), getattr(result, "figures", None)
    return loss if figures is None else torch.cat((loss.float().view(1), figures.float()))


def items_for(model: nn.Module, count: int) -> dict[str, int]:
    """The keyword argument {"num_items_in_batch": count} for the model's forward; empty if the forward does not take
    it. `count`: the number of tokens that a step's loss is the mean over."""
    known = inspect.signature(model.forward).parameters
    takes = "num_items_in_batch" in known or any(p.kind is p.VAR_KEYWORD for p in known.values())
    return {"num_items_in_batch": count} if takes else {}


def run_slice(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    model_kwargs: Mapping[str, Any],
    device: torch.device,
    pieces: Given,
) -> Tensor:
    """Run the model's own forward on one slice (a micro-batch), and backward from the loss as far as the head. Returns
    the forward's `value_of`. `pieces`: filled with the tensors that the slice's blocks get as arguments.

    `batch` may be on the device already: the model gets a copy, which is freed as the forward ends.
    """
    # copy=True: after the last slice's forward nothing reads the batches, so the next step's may take their memory.
    result = model(**{name: t.to(device, copy=True, non_blocking=True) for name, t in batch.items()}, **model_kwargs)
    loss, value = loss_of(result), value_of(result)
    del result
    with autocast_off(device.type):  # because plain training code leaves autocast before backward
        edge = get_gradient_edge(loss)
        run_backward(pieces, *pieces.due(pieces.enter([edge]), [(edge, torch.ones_like(loss))]))
    return value

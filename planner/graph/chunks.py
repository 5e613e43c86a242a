"""Computes the head (the last linear layer) and the loss in chunks of rows, so that the logits of a whole micro-batch
never exist at once.

The head's call returns `ChunkedLogits`, a tensor without data that remembers the head's input and the elementwise
operations on the way to the loss. When cross entropy is called on it, the loss is computed chunk by chunk, together
with each chunk's gradients. The chunks are summed in another order than in one matrix product, so the last bits differ
from plain PyTorch's.

If the model asks for the loss of each row, what it makes of them decides what each row's loss counts for. So forward
computes no gradients then, and backward computes each chunk's logits again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import UserError
from planner.graph.call import FrameCall, Given
from planner.graph.deferred_logits import CrossEntropy, DeferredLogits, Elementwise
from planner.graph.interface import BlockCode
from planner.graph.result import Mappings

_FROZEN_ROWS = 256
"""The most rows in a chunk if the head's weight is frozen. A matrix product with 256 rows does 256 FLOPs for each byte
of a 16-bit weight; an RTX 4090 does 164 in the time in which it reads a byte."""

Sink = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows whose cross entropy is computed from the head's input.

    inputs      the head's input, [rows, width]
    post        operations that are applied to the logits first
    target      each row's class, [rows]
    ignored     rows with this target have no loss
    shares      a factor for each row's loss, [rows]; None: all count once
    """

    inputs: Tensor
    post: Sequence[Elementwise]
    target: Tensor
    ignored: int
    shares: Tensor | None = None

    def chunks(self, count: int) -> Iterator[tuple[slice, Scored]]:
        """Yields parts of `count` rows, the last one shorter, each with its place among the rows."""
        for start in range(0, len(self.inputs), count):
            at = slice(start, start + count)
            shares = None if self.shares is None else self.shares[at]
            yield at, Scored(self.inputs[at], self.post, self.target[at], self.ignored, shares)

    def loss(self, logits: Tensor, *, each: bool = False) -> Tensor:
        """The summed loss of rows whose logits before `post` are `logits` [rows, vocabulary]; a scalar in fp32. `each`:
        the loss of each row instead, [rows] in fp32, 0 for ignored rows; `shares` are not for that."""
        for step in self.post:
            logits = step(logits)
        if self.shares is not None:
            assert not each
            return weighted_cross_entropy(logits, self.target, self.shares, self.ignored).float()
        reduction = "none" if each else "sum"
        return F.cross_entropy(logits, self.target, ignore_index=self.ignored, reduction=reduction).float()

    def loss_in_chunks(self, count: int, weight: Tensor, bias: Tensor | None, *, each: bool) -> Tensor:
        """What `loss` gives, computed from the head's weights in chunks of `count` rows, without gradients."""
        result = self.inputs.new_zeros(len(self.inputs) if each else (), dtype=torch.float32)
        for at, part in self.chunks(count):
            (result[at] if each else result).add_(part.loss(F.linear(part.inputs, weight, bias), each=each))
        return result


class Loss(Protocol):
    """Computes the summed loss of `scored`, a scalar in fp32; with `each` the loss of each row, [rows] in fp32."""

    def __call__(self, scored: Scored, *, each: bool = False) -> Tensor: ...


class ChunkedLogits(DeferredLogits):
    """Logits [..., vocabulary] that follow from the head's input `source` [..., width]. `loss`: the function that
    computes their loss. Raises UserError "loss-not-in-chunks" for any use that cannot be computed in chunks."""

    loss: Loss

    @staticmethod
    def of(hidden: Tensor, vocabulary: int, loss: Loss) -> ChunkedLogits:
        """Logits for the head's input `hidden` [..., width]."""
        logits = ChunkedLogits._make(hidden, vocabulary, hidden.dtype)
        logits.loss = loss
        return logits

    def after(
        self, step: Elementwise, source: Tensor, dtype: torch.dtype, post: Sequence[Elementwise]
    ) -> ChunkedLogits:
        logits = ChunkedLogits._make(source, self.shape[-1], dtype, post)
        logits.loss = self.loss
        return logits

    def cross_entropy(self, loss: CrossEntropy) -> Tensor:
        if not loss.plain:
            raise _refused("cross_entropy with weights or smoothing")
        if loss.reduction not in ("none", "sum", "mean"):
            raise _refused(f"cross_entropy with reduction {loss.reduction}")
        scored = Scored(self.source, self.post, loss.target, loss.ignore_index)
        if loss.reduction == "mean":
            return self.loss(scored) / (loss.target != loss.ignore_index).sum()
        return self.loss(scored, each=loss.reduction == "none")

    @classmethod
    def other_use(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise _refused(getattr(function, "__name__", str(function)))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refused(str(function))


def weighted_cross_entropy(logits: Tensor, target: Tensor, shares: Tensor, ignored: int) -> Tensor:
    """The sum over rows of cross entropy times share, in fp32. `logits` [rows, vocabulary] may be `ChunkedLogits`;
    `target` and `shares` are [rows]. Rows whose target is `ignored` have no loss."""
    if isinstance(logits, ChunkedLogits):
        return logits.loss(Scored(logits.source, logits.post, target, ignored, shares))
    return (F.cross_entropy(logits, target, ignore_index=ignored, reduction="none") * shares).sum()


def _refused(use: str) -> UserError:
    return UserError(
        f"The loss cannot be computed in chunks: the model uses its logits for {use}.",
        code="loss-not-in-chunks",
        hint="use exact: true",
    )


def check_chunked(module: nn.Module) -> None:
    """Raise UserError "loss-not-in-chunks" if the head `module` is not a plain linear layer."""
    if type(module) is not nn.Linear:
        raise _refused(f"what {type(module).__name__} does, which is no linear layer")


def chunk_rows(weight: Tensor) -> int:
    """The number of rows in a chunk for a head with this weight [vocabulary, width]. A chunk's logits in fp32 take a
    quarter of the bytes of the weight's gradient in fp32, but a chunk has at least 128 rows. If the weight is frozen,
    no sum of gradients is read and written with each chunk: fewer rows are enough to keep a card busy computing."""
    rows = max(128, weight.shape[-1] // 4)
    return rows if weight.requires_grad else min(rows, _FROZEN_ROWS)


def loss_only(module: nn.Module, count: int) -> Callable[[Tensor], ChunkedLogits]:
    """A forward of the head `module` for evaluation: a loss without gradients, computed in chunks of `count` rows. The
    forward uses the weights that `module` has when it is called."""

    def forward(hidden: Tensor) -> ChunkedLogits:
        weight, bias = cast(Tensor, module.weight).detach(), module.bias
        parameters = weight, cast(Tensor, bias).detach() if bias is not None else None

        def loss(scored: Scored, *, each: bool = False) -> Tensor:
            return scored.loss_in_chunks(count, *parameters, each=each)

        return ChunkedLogits.of(hidden, weight.shape[0], loss)

    return forward


class ChunkedHead(FrameCall, ABC):
    """The call of the head (the last linear layer) for one micro-batch, with loss and gradients in chunks of
    `chunk_rows` rows.

    Between forward and backward it holds the gradients of the summed loss. Backward multiplies them by `scale`, the
    gradient of that sum, which the rest of the model sends (one over the number of the step's tokens). Of a loss for
    each row it holds the head's input (`waiting`), and backward computes logits and gradients; `scale` [rows] is then
    the gradient of each row's loss.
    """

    def __init__(
        self, pair: BlockCode, tensors: Sequence[Tensor], chunk_rows: int, pieces: Given | None = None
    ) -> None:
        super().__init__(pair, tensors, pieces)
        self.chunk_rows = chunk_rows
        self.anchor: Tensor
        self.of_rows: Tensor | None = None
        self.of_weights: dict[str, Tensor] = {}
        self.scale: Tensor | None = None
        self.waiting: Scored | None = None

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The head's weights by the names they have in the module: weight [vocabulary, width], and bias [vocabulary]
        if there is one."""

    def enter(self, tensors: Sequence[Tensor], mappings: Mappings, anchor: Tensor) -> Any:
        """The logits as `ChunkedLogits`, without data: they are computed later, together with the loss. Raises
        UserError under autocast."""
        if torch.is_autocast_enabled(anchor.device.type):
            raise _refused("a loss under autocast")
        self.anchor = anchor
        self.keep(tensors, anchor)
        hidden = tensors[0].detach()
        return ChunkedLogits.of(hidden, self.pair.output_values[0].shape[-1], self._loss)

    def _loss(self, scored: Scored, *, each: bool = False) -> Tensor:
        return cast(Callable[..., Tensor], _ChunkedLoss.apply)(self, self.anchor, scored, each)

    def compute(self, scored: Scored, *, each: bool) -> Tensor:
        """The summed loss of `scored`, whose gradients are computed in the same pass and kept in this call; with `each`
        the loss of each row, without gradients. Raises UserError for a second loss, which would need its own scale."""
        if self.of_rows is not None or self.of_weights or self.waiting is not None:
            raise _refused("more than one loss")
        if not each:
            return self._compute_gradients(scored)
        self.waiting, weights = scored, self.weights()
        return scored.loss_in_chunks(self.chunk_rows, weights["weight"], weights.get("bias"), each=True)

    def _compute_gradients(self, scored: Scored) -> Tensor:
        """Compute the gradients of the summed loss of `scored` and keep them in this call. Returns the loss."""
        weights = self.weights()
        weight, bias = weights["weight"], weights.get("bias")
        total = scored.inputs.new_zeros((), dtype=torch.float32)
        if self.edges[0] is not None:
            self.of_rows = torch.empty_like(scored.inputs)
        for at, part in scored.chunks(self.chunk_rows):
            with torch.enable_grad():
                logits = F.linear(part.inputs, weight, bias).detach().requires_grad_()
                loss = part.loss(logits)
            (grad,) = torch.autograd.grad(loss, logits)
            total += loss.detach()
            del loss, logits
            if self.of_rows is not None:
                self.of_rows[at].copy_(grad @ weight)
            if "weight" in self.pair.param_grads:
                self._add_product("weight", grad.t(), part.inputs)
            if "bias" in self.pair.param_grads:
                self._add("bias", grad.sum(0, dtype=torch.float32))
            del grad
        return total

    def _add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        if name in self.of_weights and left.dtype == torch.float32:
            self.of_weights[name].addmm_(left, right)
        else:  # narrower sums would lose a bit with every chunk
            self._add(name, (left @ right).float())

    def _add(self, name: str, part: Tensor) -> None:
        if name in self.of_weights:
            self.of_weights[name].add_(part)
        else:
            self.of_weights[name] = part

    def finish(self, sink: Sink) -> list[Tensor | None]:
        """Returns the gradient of the head's input as a list of one, None if the input needs no gradient. Passes the
        gradient of each weight to `sink`. All are multiplied by the scale that has arrived; of a loss for each row they
        are computed here. Raises UserError if no scale has arrived."""
        if self.scale is None:
            raise _refused("something else than the loss")
        if self.waiting is not None:
            self._compute_gradients(replace(self.waiting, shares=self.scale))
            self.waiting = self.scale = None
        scale, of_rows, dtype = self.scale, self.of_rows, self.pair.output_values[0].dtype
        for name in tuple(self.of_weights):
            sink(name, _times(self.of_weights.pop(name), scale).to(dtype))
        self.of_rows = self.scale = None
        return [_times(of_rows, scale).view(self._shape) if of_rows is not None else None]

    @property
    def _shape(self) -> torch.Size:
        value = self.pair.primal_values[self.pair.n_params + self.pair.n_buffers]
        assert value is not None
        return value.shape


def _times(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """`gradient`, multiplied in place by `scale` if there is one."""
    return gradient if scale is None else gradient.mul_(scale)


class _ChunkedLoss(torch.autograd.Function):
    """The loss as an autograd function: its forward calls `ChunkedHead.compute`, its backward only stores the scale."""

    @staticmethod
    def forward(ctx: Any, call: ChunkedHead, anchor: Tensor, scored: Scored, each: bool) -> Tensor:
        ctx.call = call
        return call.compute(scored, each=each)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, ...]:
        ctx.call.scale = scale
        return None, None, None, None

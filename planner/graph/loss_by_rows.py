"""Computes the loss from the head's logits a few rows at a time, with the bits of plain PyTorch and far less memory.

Plain PyTorch converts all logits to fp32, keeps their log-softmax, and makes the gradients of both: for logits in 16
bits about seven times their bytes. Each row of these depends on that row alone. So here the logits stay as the head
made them. Cross entropy converts a few rows at a time and keeps one number per row, the logarithm of the target's
probability. PyTorch adds these up by its own code, in its own order. Backward converts the rows again and writes each
row's gradient over its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from planner.errors import UserError
from planner.graph.deferred_logits import CrossEntropy, DeferredLogits, Elementwise
from planner.graph.interface import BlockCode

_ELEMENTS = 1 << 24
"""The fewest logits that are converted at a time: 64 MiB in fp32. A card computes on them for longer than their
operations take to be issued."""

_TURNS = 64
"""All rows are done in about so many turns at most. What one turn needs is then an eighth of the logits' own memory."""

_MULTIPLE = 64
"""Rows are converted in multiples of this, so that each row begins at the same alignment as in one piece: vectorized
sums depend on it."""


def by_rows(result: Any, code: BlockCode) -> Any:
    """The head's `result` in a form whose cross entropy is computed a few rows at a time. The result is returned
    unchanged if it is not one tensor of logits, under autocast, or if the head keeps memory that it shares with it."""
    if not isinstance(result, Tensor) or isinstance(result, DeferredLogits) or not code.gives_outputs_away:
        return result
    return logits_by_rows(result)


def logits_by_rows(logits: Tensor) -> Tensor:
    """`logits` [..., vocabulary] in a form whose cross entropy is computed a few rows at a time. Backward overwrites
    them. Under autocast they are returned unchanged."""
    if logits.dim() < 2 or not logits.is_floating_point() or torch.is_autocast_enabled(logits.device.type):
        return logits
    return RowLogits.of(logits)


class _Readers:
    """Who reads the head's logits, shared by all `RowLogits` that follow from them. `count`: how many operations have
    read them. `by_rows`: a loss has been computed by rows; `in_one_piece`: an operation with a gradient has got them in
    one piece."""

    def __init__(self) -> None:
        self.count, self.by_rows, self.in_one_piece = 0, False, False


class RowLogits(DeferredLogits):
    """Logits [..., vocabulary] that follow elementwise from the head's logits `source` [..., vocabulary]. For any use
    but cross entropy they are computed in one piece, as in plain PyTorch. Raises UserError "logits-read-again" for a
    second loss of logits whose first was computed by rows: the two gradients would not be added where plain PyTorch
    adds them.

    compute         computes them in one piece, in the autograd graph of the head's logits
    in_one_piece    the result of `compute`, None before
    """

    compute: Callable[[], Tensor]
    in_one_piece: Tensor | None
    readers: _Readers

    @staticmethod
    def of(logits: Tensor) -> RowLogits:
        """The head's own logits."""
        return RowLogits._of(logits, logits.dtype, (), _Readers(), lambda: logits)

    @staticmethod
    def _of(
        source: Tensor,
        dtype: torch.dtype,
        post: Sequence[Elementwise],
        readers: _Readers,
        compute: Callable[[], Tensor],
    ) -> RowLogits:
        logits = RowLogits._make(source, source.shape[-1], dtype, post)
        logits.readers, logits.compute, logits.in_one_piece = readers, compute, None
        if source.requires_grad:  # so that a gradient for tensors without data cannot get lost
            with torch._C.DisableTorchFunctionSubclass():
                cast(Any, logits.requires_grad_()).register_hook(_refuse)
        return logits

    def after(self, step: Elementwise, source: Tensor, dtype: torch.dtype, post: Sequence[Elementwise]) -> RowLogits:
        return RowLogits._of(source, dtype, post, self.readers, lambda: step(self.values()))

    def cross_entropy(self, loss: CrossEntropy) -> Tensor:
        if not loss.plain or self.readers.in_one_piece:
            return F.cross_entropy(
                self.values(),
                loss.target,
                loss.weight,
                loss.size_average,
                loss.ignore_index,
                loss.reduce,
                loss.reduction,
                loss.label_smoothing,
            )
        self._read(by_rows=True)
        counted = loss.target != loss.ignore_index
        target = torch.where(counted, loss.target, 0)
        picked = cast(Tensor, cast(Any, _LogProbabilities).apply(self.source, self.post, target, self.readers))
        # The sum over rows by PyTorch's own code: it reads the same numbers in the same order, whatever the number of
        # classes.
        return F.nll_loss(picked, torch.where(counted, 0, -100), ignore_index=-100, reduction=loss.reduction)

    def values(self) -> Tensor:
        """These logits in one piece, in the autograd graph of the head's logits."""
        if self.in_one_piece is None:
            self._read(by_rows=False)
            self.in_one_piece = self.compute()
        return self.in_one_piece

    def _read(self, *, by_rows: bool) -> None:
        readers = self.readers
        readers.count += 1
        if torch.is_grad_enabled() and self.source.requires_grad:
            if readers.by_rows:
                raise UserError(
                    "The model computes more than its loss from its logits.",
                    code="logits-read-again",
                    hint="offmate trains models whose loss is one cross entropy of the logits, or no cross entropy",
                )
            readers.by_rows, readers.in_one_piece = by_rows, not by_rows

    @classmethod
    def other_use(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        plain_args, plain_kwargs = tree_map_only(RowLogits, RowLogits.values, (tuple(args), dict(kwargs)))
        return function(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:  # `requires_grad_` and hooks look at such
            return args[0]
        raise _refused()


def _refuse(gradient: Tensor) -> None:
    raise _refused()


def _refused() -> UserError:
    return UserError(
        "The model gives its logits to code that PyTorch's operations do not show.",
        code="logits-not-seen",
        hint="its loss must be computed from the logits by PyTorch's operations",
    )


class _LogProbabilities(torch.autograd.Function):
    """The logarithm of each row's target's probability, [rows, 1], from logits [rows, vocabulary]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, post: Sequence[Elementwise], target: Tensor, readers: _Readers) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.post, ctx.readers = post, readers
        picked = [_log_softmax(logits[rows], post).gather(1, target[rows, None]) for rows in _slices(*logits.shape)]
        return torch.cat(picked)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target = ctx.saved_tensors
        logits = logits.detach()
        of_logits = logits if ctx.readers.count == 1 else torch.empty_like(logits)
        for rows in _slices(*logits.shape):
            some = logits[rows].requires_grad_()
            with torch.enable_grad():
                log_probabilities = _log_softmax(some, ctx.post)
            dense = torch.zeros_like(log_probabilities).scatter_(1, target[rows, None], gradient[rows])
            (of_some,) = torch.autograd.grad(log_probabilities, some, dense)
            del log_probabilities, dense
            of_logits[rows].copy_(of_some)
        return of_logits, None, None, None


def _log_softmax(logits: Tensor, post: Sequence[Elementwise]) -> Tensor:
    for step in post:
        logits = step(logits)
    return F.log_softmax(logits, 1)


def _slices(rows: int, vocabulary: int) -> list[slice]:
    count = _MULTIPLE * max(_ELEMENTS // vocabulary // _MULTIPLE, -(-rows // (_TURNS * _MULTIPLE)), 1)
    return [slice(start, start + count) for start in range(0, rows, count)]

"""Computes the loss from the head's logits a few rows at a time, with the bits of plain PyTorch and far less memory.

Plain PyTorch converts all logits to fp32, keeps their log-softmax, and makes the gradients of both: for logits in 16
bits about seven times their bytes. Each row of these depends on that row alone. So here the logits stay as the head
made them. Cross entropy converts a few rows at a time and keeps one number per row, the logarithm of the target's
probability. PyTorch adds these up by its own code, in its own order. Backward converts the rows again and writes each
row's gradient over its logits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.errors import UserError
from planner.graph.deferred_logits import CrossEntropy, DeferredLogits, Elementwise, attribute
from planner.graph.interface import BlockCode

_ELEMENTS = 1 << 24
"""Logits that are converted at a time: 64 MiB in fp32. A card computes on them for longer than their
operations take to be issued."""

_FEWEST, _MOST = 4, 64
"""All rows are done in about so many turns: of few logits a quarter at a time, of very many a 64th. What a turn needs
is then at most half as much as plain PyTorch does, and mostly far less."""

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
    one piece; `bare`: the model has got them in a form whose changes PyTorch does not count. `waiting`: those of the
    `RowLogits` that have not been computed in one piece, in the model's order."""

    def __init__(self) -> None:
        self.count, self.by_rows, self.in_one_piece, self.bare = 0, False, False, False
        self.waiting: list[weakref.ref[RowLogits]] = []


class RowLogits(DeferredLogits):
    """Logits [..., vocabulary] that follow elementwise from the head's logits `source` [..., vocabulary]. For any use
    but cross entropy they are computed in one piece, as in plain PyTorch. Raises UserError "logits-read-again" for a
    second loss of logits whose first was computed by rows: the two gradients would not be added where plain PyTorch
    adds them. Raises UserError "logits-changed" if the source is written over while it is still needed, or read after
    that.

    compute         computes them in one piece, in the autograd graph of the head's logits; None when that is done
    in_one_piece    the result of `compute`, None before
    versions        how often the source and `in_one_piece` had been written when these logits were made
    """

    compute: Callable[[], Tensor] | None
    in_one_piece: Tensor | None
    versions: tuple[int, int]
    readers: _Readers

    @staticmethod
    def of(logits: Tensor) -> RowLogits:
        """The head's own logits."""
        own = RowLogits._of(logits, logits.dtype, (), _Readers())
        own.in_one_piece, own.versions = logits, (logits._version, logits._version)
        return own

    @staticmethod
    def _of(source: Tensor, dtype: torch.dtype, post: Sequence[Elementwise], readers: _Readers) -> RowLogits:
        logits = RowLogits._make(source, source.shape[-1], dtype, post)
        logits.readers, logits.compute, logits.in_one_piece, logits.versions = readers, None, None, (source._version, 0)
        if source.requires_grad:  # so that a gradient for tensors without data cannot get lost
            with torch._C.DisableTorchFunctionSubclass():
                cast(Any, logits.requires_grad_()).register_hook(_refuse)
        return logits

    def after(self, step: Elementwise, source: Tensor, dtype: torch.dtype, post: Sequence[Elementwise]) -> Tensor:
        if self._changed():
            self._use(by_rows=False)
            return step(self.values())
        logits = RowLogits._of(source if torch.is_grad_enabled() else source.detach(), dtype, post, self.readers)
        logits.compute = lambda: step(self._computed())
        self.readers.waiting.append(weakref.ref(logits))
        return logits

    def cross_entropy(self, loss: CrossEntropy) -> Tensor:
        by_rows = self._is_by_rows(loss)
        self._use(by_rows=by_rows)
        if not by_rows:
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
        self.readers.count += 1
        counted = loss.target != loss.ignore_index
        target = torch.where(counted, loss.target, 0)
        picked = cast(Tensor, cast(Any, _LogProbabilities).apply(self.source, self.post, target, self.readers))
        # The sum over rows by PyTorch's own code: it reads the same numbers in the same order, whatever the number of
        # classes.
        return F.nll_loss(picked, torch.where(counted, 0, -100), ignore_index=-100, reduction=loss.reduction)

    def _is_by_rows(self, loss: CrossEntropy) -> bool:
        classes = loss.target.dtype is torch.int64 and loss.target.shape == self.source.shape[:1] and len(loss.target)
        if not (loss.plain and classes) or self.readers.in_one_piece or self._changed():
            return False
        return not torch.is_autocast_enabled(self.source.device.type)  # it would run the operations in other dtypes

    def values(self) -> Tensor:
        """These logits in one piece, in the autograd graph of the head's logits."""
        self.readers.count += 1
        # As in plain PyTorch, all that came before this use is computed before it: the use may write over its logits,
        # and gradients are added up in the order of the operations.
        for reference in self.readers.waiting:
            if (logits := reference()) is not None:
                logits._computed()
        self.readers.waiting.clear()
        return self._computed()

    def _computed(self) -> Tensor:
        if self.compute is not None or self.readers.by_rows:
            self._check_source()
        if self.compute is not None:
            with torch.set_grad_enabled(self.source.requires_grad):  # as it was when the model asked for them
                self.in_one_piece = self.compute()
            self.compute, self.versions = None, (self.versions[0], self.in_one_piece._version)
        return cast(Tensor, self.in_one_piece)

    def _changed(self) -> bool:
        """Whether anyone has written over these logits, or over those from which they follow, or may have."""
        source, own = self.versions
        changed = self.in_one_piece is not None and self.in_one_piece._version != own
        return self.readers.bare or self.source._version != source or changed

    def _check_source(self) -> None:
        if self.source._version != self.versions[0]:
            raise UserError(
                "The logits have been written over, by the model or by backward, and are still needed.",
                code="logits-changed",
                hint="compute new logits (`logits = logits / 2`, not `logits.div_(2)`), and read them before backward",
            )

    def _use(self, *, by_rows: bool) -> None:
        """Note an operation that may have a gradient."""
        if torch.is_grad_enabled() and self.source.requires_grad:
            if self.readers.by_rows:
                raise UserError(
                    "The model computes more than its loss from its logits.",
                    code="logits-read-again",
                    hint="offmate trains models whose loss is one cross entropy of the logits, or no cross entropy",
                )
            self.readers.by_rows, self.readers.in_one_piece = by_rows, not by_rows

    @classmethod
    def other_use(cls, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        plain_args, plain_kwargs = tree_map_only(RowLogits, RowLogits.values, (tuple(args), dict(kwargs)))
        result = function(*plain_args, **plain_kwargs)
        results = tree_leaves(result)
        no_gradient = results and all(torch.is_tensor(value) and not value.requires_grad for value in results)
        for logits in tree_leaves((args, kwargs)):
            if isinstance(logits, RowLogits):
                if not no_gradient:
                    logits._use(by_rows=False)
                if logits.readers.by_rows:
                    logits._check_source()
                logits.readers.bare |= attribute(function) == "data"
        return result

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:  # `requires_grad_` and `register_hook` call it
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
    multiples = rows / _MULTIPLE
    usual = min(_ELEMENTS // vocabulary // _MULTIPLE, math.ceil(multiples / _FEWEST))
    count = _MULTIPLE * max(1, usual, math.ceil(multiples / _MOST))
    return [slice(start, start + count) for start in range(0, rows, count)]

"""Sets a loss under which every document counts the same, however many of its tokens are learned.

transformers' loss is the mean over tokens, so that a document with a thousand of them counts a hundred times as much as
one with ten. This loss is the mean over documents of the mean over each document's tokens. `position_ids` say where
documents begin in packed rows. Batches need nothing more: the share of each token is computed when the model is called.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.models.encoder_decoder import IGNORED

_given: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("given", default=None)
"""Shares and number of documents of the slice that the model is called with in this thread."""


class DocumentLoss:
    """The mean over documents, which replaces the model's own loss. `used`: the model has called it."""

    def __init__(self) -> None:
        from planner.graph.chunks import weighted_cross_entropy  # loads the tracer, which few callers need

        self._weighted_sum = weighted_cross_entropy
        self.used = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> Tensor:
        """The mean over `num_items_in_batch` documents, or over the documents of the slice where that is None. Logits
        are [rows, length, vocabulary], labels [rows, length]."""
        self.used = True
        shares_and_count = _given.get()
        assert shares_and_count is not None
        _given.set(None)  # otherwise they would take memory until the next slice
        shares, count = shares_and_count
        flat = logits.float().view(-1, logits.shape[-1])
        total = self._weighted_sum(flat, _shifted(labels).reshape(-1), shares.reshape(-1), IGNORED)
        return total / (count if num_items_in_batch is None else num_items_in_batch)


def set_document_loss(model: nn.Module, causal: nn.Module) -> None:
    """Let `causal` compute a DocumentLoss when `model` is called, which is `causal` or peft's wrapper of it."""
    cast(Any, causal).loss_function = DocumentLoss()
    model.register_forward_pre_hook(_sharing, with_kwargs=True)


def shares_of(labels: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The share of the label that each token predicts, [rows, length] in fp32: 1 / the number of learned tokens in the
    label's document. Second result: how many documents have learned tokens. `labels` and `position_ids` are
    [rows, length]; `position_ids` is None where rows are not packed."""
    begins = torch.zeros_like(labels) if position_ids is None else (position_ids == 0).long()
    place = (begins.cumsum(1) - 1).clamp(min=0)
    # A document's first token is never learned, so a learned token is predicted by one of the same document.
    learned = (_shifted(labels) != IGNORED).long()
    counts = torch.zeros_like(place).scatter_add(1, place, learned)
    return counts.clamp(min=1).float().reciprocal().gather(1, place), (counts > 0).sum()


def _shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts; none for the last."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _sharing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        _given.set(shares_of(kwargs["labels"], kwargs.get("position_ids")))

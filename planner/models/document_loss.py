"""Sets a loss in which every document counts the same, whatever the number of its tokens that are learned.

transformers' loss is the mean over tokens, so that a document with a thousand of them counts a hundred times as much
as one with ten. This loss is the mean over documents of the mean over each document's tokens. `position_ids` show
where documents begin in packed rows. Batches need nothing more: the weight of each token is computed when the model is
called.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.models.encoder_decoder import IGNORED

_given: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("given", default=None)
"""Token weights and number of documents of the micro-batch with which the model is being called in this thread."""


class DocumentLoss:
    """A loss that is the mean over documents of the mean over each document's tokens; it replaces the model's own.
    `used`: the model has called it."""

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
        """The sum over documents of each document's mean loss, divided by `num_items_in_batch`, here the number of
        documents in the step; None: in the micro-batch. `logits` [rows, length, vocabulary], `labels` [rows, length].
        """
        self.used = True
        shares_and_count = _given.get()
        assert shares_and_count is not None
        _given.set(None)  # otherwise they would take memory until the next micro-batch
        shares, count = shares_and_count
        flat = logits.float().view(-1, logits.shape[-1])
        total = self._weighted_sum(flat, shifted(labels).reshape(-1), shares.reshape(-1), IGNORED)
        return total / (count if num_items_in_batch is None else num_items_in_batch)


def set_document_loss(model: nn.Module, causal: nn.Module) -> None:
    """Let the language model `causal` compute a DocumentLoss when `model` is called; `model` is `causal` or peft's
    wrapper of it."""
    cast(Any, causal).loss_function = DocumentLoss()
    model.register_forward_pre_hook(_sharing, with_kwargs=True)


def shares_of(labels: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The factor of each label's loss, 1 / the number of learned tokens in its document; [rows, length] in fp32, at
    the place of the token that predicts the label. Second result: the number of documents that have learned tokens.
    `labels` and `position_ids` are [rows, length]; `position_ids` is None if rows are not packed."""
    begins = torch.zeros_like(labels) if position_ids is None else (position_ids == 0).long()
    place = (begins.cumsum(1) - 1).clamp(min=0)
    # A document's first token is never learned, so a learned token is predicted by one of the same document.
    learned = (shifted(labels) != IGNORED).long()
    counts = torch.zeros_like(place).scatter_add(1, place, learned)
    return counts.clamp(min=1).float().reciprocal().gather(1, place), (counts > 0).sum()


def shifted(labels: Tensor) -> Tensor:
    """The label that each token predicts, [rows, length]; IGNORED for the last token of a row."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _sharing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        _given.set(shares_of(kwargs["labels"], kwargs.get("position_ids")))

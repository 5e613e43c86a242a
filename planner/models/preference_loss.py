"""Sets a loss that learns from preferences: it replaces the model's own, and scores whole answers.

A micro-batch of n pairs has 2n rows: the n chosen answers, each after its prompt, then the n rejected ones. With KTO
the second n rows are the same prompts with answers to others. Labels mark the answers' tokens. Its other tensors are
taken out before the model is called: `reference` [2n], the rows' log-probabilities by the reference model, and for KTO
`desirable` [n].
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.job.schema import Job
from planner.keys.preference import DESIRABLE, REFERENCE
from planner.models.document_loss import shifted
from planner.models.encoder_decoder import IGNORED
from planner.models.preferences import PAIR_LOSSES, Side, kto


@dataclass(frozen=True, slots=True)
class _Given:
    """What the loss reads beside the logits: the tokens to be scored, [2n, length], IGNORED elsewhere; the tensors of
    the batch that the model does not get; and the number of answers' tokens of each row, [2n]."""

    targets: Tensor
    counts: Tensor
    more: dict[str, Tensor]


_given: ContextVar[_Given | None] = ContextVar("preference_given", default=None)
"""What the micro-batch with which the model is being called in this thread has for the loss."""
_scored: ContextVar[Tensor | None] = ContextVar("scored", default=None)
"""The log-probabilities that the loss has computed in this thread, [2n]."""


class PreferenceLoss:
    """The job's loss of a micro-batch; it replaces the model's own. `used`: the model has called it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.used = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> Tensor:
        """The mean over the micro-batch's pairs, divided by the number of the step's micro-batches: as in TRL a step is
        the mean of its micro-batches. `num_items_in_batch`: the pairs of the step; None: the micro-batch is the step.
        `logits` [2n, length, vocabulary], `labels` [2n, length]."""
        self.used = True
        given = _given.get()
        assert given is not None
        _given.set(None)  # otherwise it would take memory until the next micro-batch
        rows = len(labels)
        flat = logits.float().view(-1, logits.shape[-1])
        lost = F.cross_entropy(flat, shifted(given.targets).reshape(-1), ignore_index=IGNORED, reduction="none")
        logps = -lost.view(rows, -1)[:, :-1]
        answers = logps * (labels[:, 1:] != IGNORED)
        sums = answers.sum(1)
        _scored.set(sums.detach())
        loss = preference_loss(sums, given.counts, given.more, self._job)
        if share := self._job.sft_share:
            loss = loss + share * self._supervised(logps, given, rows // 2)
        return mean_of_step(loss, rows // 2, num_items_in_batch)

    def _supervised(self, logps: Tensor, given: _Given, pairs: int) -> Tensor:
        """The loss of supervised fine-tuning on the chosen answers: the mean over their tokens or, with
        `loss_weighting: documents`, the mean over answers of the mean over tokens."""
        scored = (given.targets[:pairs, 1:] != IGNORED).sum(1)
        of_rows = -logps[:pairs].sum(1)
        if self._job.loss_weighting == "documents":
            return (of_rows / scored.clamp(min=1)).mean()
        return of_rows.sum() / scored.sum().clamp(min=1)


def preference_loss(sums: Tensor, counts: Tensor, more: dict[str, Tensor], job: Job) -> Tensor:
    """The job's loss of a micro-batch without the supervised part, a scalar. `sums` [2n]: the log-probabilities of the
    answers; `counts` [2n]: the numbers of their tokens; `more`: `reference` and `desirable`, see this module."""
    first, second = sides(sums, counts, more)
    assert job.preference is not None
    if job.preference == "kto":
        return kto(first, second, more[DESIRABLE].bool(), job).mean()
    return PAIR_LOSSES[job.preference](first, second, job).mean()


def sides(sums: Tensor, counts: Tensor, more: dict[str, Tensor]) -> tuple[Side, Side]:
    """The first and the second n rows of a micro-batch, as in `preference_loss`."""
    parts = sums.chunk(2), counts.chunk(2), more[REFERENCE].chunk(2) if REFERENCE in more else (None, None)
    first, second = (
        Side(logps=logps, counts=n, reference=reference) for logps, n, reference in zip(*parts, strict=True)
    )
    return first, second


def set_preference_loss(model: nn.Module, causal: nn.Module, job: Job) -> None:
    """Let the language model `causal` compute a PreferenceLoss when `model` is called, and `model` give the rows'
    log-probabilities as `figures` [2n] of its result. `model` is `causal` or peft's wrapper of it. Dropout is switched
    off, as in TRL: with it the model would differ from the reference before the first step."""
    without_dropout(model)
    cast(Any, causal).loss_function = PreferenceLoss(job)

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        more = {name: kwargs[name] for name in (REFERENCE, DESIRABLE) if name in kwargs}
        if (labels := kwargs.get("labels")) is not None:
            _given.set(_Given(_targets(kwargs["input_ids"], labels, job), counts_of(labels), more))
        return args, {name: value for name, value in kwargs.items() if name not in more}

    def tell(module: nn.Module, args: Any, result: Any) -> None:
        scores = _scored.get()
        if scores is not None:
            _scored.set(None)
            result.figures = scores

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.register_forward_hook(tell)


def mean_of_step(loss: Tensor, pairs: int, num_items_in_batch: Tensor | int | None) -> Tensor:
    """`loss`, the mean over a micro-batch of `pairs` pairs, divided by the number of the step's micro-batches.
    `num_items_in_batch`: the pairs of the step; None: the micro-batch is the step."""
    if isinstance(num_items_in_batch, Tensor):
        return loss / (num_items_in_batch / pairs)
    return loss if num_items_in_batch is None else loss / num_items_in_batch * pairs


def without_dropout(model: nn.Module) -> None:
    """Switch off all dropout of `model`, that of adapters and that within the code of a layer included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def counts_of(labels: Tensor) -> Tensor:
    """The number of scored tokens of each row of `labels` [2n, length]; [2n]. A row's first token is never scored."""
    return (labels[:, 1:] != IGNORED).sum(1)


def _targets(input_ids: Tensor, labels: Tensor, job: Job) -> Tensor:
    """The tokens whose log-probabilities the loss needs, [2n, length]: those of the answers and, with `sft_on_prompt`,
    those of the chosen answers' prompts. An answer ends its row, so padding is what follows its last token."""
    if not (job.sft_share and job.sft_on_prompt):
        return labels
    learned = labels != IGNORED
    inside = learned.flip(1).cumsum(1).flip(1) > 0
    inside[len(labels) // 2 :] = False
    return torch.where(inside | learned, input_ids, IGNORED)

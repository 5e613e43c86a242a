"""Applies to a model what a job changes in training: noise on its embeddings (NEFTune), or another loss, that of
preferences among them.

Noise and the smoothed loss are transformers' own code. All changes run in the model's code outside its blocks, so that
a recomputed block does not repeat them.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.models.document_loss import DocumentLoss, set_document_loss
from planner.models.encoder_decoder import has_pairs, have_mean_of_step
from planner.models.preference_loss import PreferenceLoss, set_preference_loss
from planner.models.reward_model import set_reward_loss
from planner.models.router_loss import set_router_loss


class SmoothedLoss:
    """The loss that transformers' Trainer uses with `label_smoothing_factor`; it replaces the model's own. `used`: the
    model has called it."""

    def __init__(self, factor: float) -> None:
        from transformers.trainer_pt_utils import LabelSmoother  # loads peft, which few jobs need

        self._smoother = LabelSmoother(epsilon=factor)
        self.used = False

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: object,
    ) -> Tensor:
        """The sum of the smoothed loss over tokens, divided by `num_items_in_batch`. `logits` [rows, length,
        vocabulary], `labels` [rows, length]."""
        self.used = True
        smoother: Any = self._smoother
        loss = smoother({"logits": logits.float()}, labels, shift_labels=True, num_items_in_batch=num_items_in_batch)
        return cast(Tensor, loss)


def set_trainer_options(model: nn.Module, job: Job) -> None:
    """Set noise and loss of `model` (perhaps wrapped by peft) as the job's keys say. Raises UserError if the job sets
    a routers' loss and the model has none."""
    if has_pairs(model):
        have_mean_of_step(_causal(model))
    if job.neftune_noise_alpha is not None:
        from transformers.integrations.neftune import activate_neftune  # loads peft, which few jobs need

        activate_neftune(cast(Any, model), job.neftune_noise_alpha)  # type: ignore[no-untyped-call]
    if job.label_smoothing_factor:
        _causal(model).loss_function = SmoothedLoss(job.label_smoothing_factor)
    if job.rewards:
        set_reward_loss(model, job)
    elif job.preference is not None:
        set_preference_loss(model, _causal(model), job)
    elif job.loss_weighting == "documents":
        set_document_loss(model, _causal(model))
    set_router_loss(model, job)


def check_trainer_options(model: nn.Module, job: Job) -> None:
    """Raise UserError if the job sets another loss, but `model` does not call it and computes its own. Call this after
    `set_trainer_options` and a forward of `model`."""
    loss = getattr(_causal(model), "loss_function", None)
    used = isinstance(loss, (SmoothedLoss, DocumentLoss, PreferenceLoss)) and loss.used
    if job.label_smoothing_factor and not used:
        raise UserError(
            f"{job.model} has a loss of its own, which cannot be smoothed.",
            code="loss-not-smoothed",
            exit_code=Exit.USAGE,
            hint="leave label_smoothing_factor out",
        )
    if job.preference is not None and not used and not job.rewards:
        raise UserError(
            f"{job.model} computes its loss by itself, and cannot learn from preferences.",
            code="loss-not-scored",
            exit_code=Exit.USAGE,
            numbers=(f"preference: {job.preference}",),
            hint="use a model whose loss is that of a causal language model in transformers",
        )
    if job.loss_weighting == "documents" and not used:
        raise UserError(
            f"{job.model} has a loss of its own, whose tokens all count alike.",
            code="loss-not-weighted",
            exit_code=Exit.USAGE,
            numbers=("loss_weighting: documents",),
            hint="leave loss_weighting out",
        )


def _causal(model: nn.Module) -> Any:
    """The model itself, without peft's wrapper."""
    untyped: Any = model
    return untyped.get_base_model() if hasattr(untyped, "get_base_model") else untyped

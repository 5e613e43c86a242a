"""The keys of a job for the loss, and for noise added in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.fields import Beta, Noise, RouterShare, Switch
from planner.keys.source import SWITCHED_OFF, Mistake, Source

_SMOOTHED, _SHARE, _WEIGHTING = "label_smoothing_factor", "router_aux_loss_coef", "loss_weighting"


class LossKeys(Keys):
    """These keys change the loss, or add noise in training; with `exact: true` all numbers are those of plain PyTorch
    with transformers' code, in every bit."""

    loss_weighting: Annotated[Literal["tokens", "documents"], Field(description="tokens or documents")] = "tokens"
    """What the loss of a step or an evaluation is averaged over. `tokens`: over all learned tokens, as in transformers,
    so a long answer counts more than a short one. `documents`: each document has its own mean, and all documents count
    alike; documents that are packed into one row count separately, and a piece that `long_rows: split` cuts off counts
    as a document. `documents` cannot be used with `packing: wrapped`, with `label_smoothing_factor`, and with a model
    that computes its own loss (`loss-not-weighted`)."""
    label_smoothing_factor: Beta = 0.0
    """This share of each token's target is spread over the whole vocabulary, as in transformers' Trainer, also in
    evaluations. It needs `exact: true`. A model that computes its own loss is refused (`loss-not-smoothed`)."""
    neftune_noise_alpha: Noise = None
    """NEFTune: in training, transformers' own code adds noise to the embeddings of each micro-batch, under the seed of
    that micro-batch."""
    router_aux_loss_coef: RouterShare = None
    """For a mixture of experts: the weight of the routers' auxiliary (load-balancing) loss, which is the model's own
    over all tokens but padding, in the loss of each micro-batch, also in evaluations. `auto` is the weight in the
    model's config; null is the same if the config has `output_router_logits: true`; 0 means no such loss. A number is
    refused for a model without that loss (`no-router-loss`) and beside `label_smoothing_factor`. While the loss has a
    weight, micro-batches cannot be left to the planner (`router-loss-per-slice`)."""
    router_aux_loss_mean: Switch = False
    """False: each micro-batch adds the routers' loss in full, as in transformers' Trainer, axolotl and LLaMA-Factory.
    True: it is divided by `gradient_accumulation_steps`, as in TRL; evaluations add it in full, as there. A file of TRL
    has this mean and `router_aux_loss_coef: auto` by default. Together they have no effect on a model whose config
    gives the weight another name (JetMoE, DBRX), as in TRL."""


def check_loss(values: Mapping[str, object], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes of loss keys that exclude one another. `values`: canonical key -> value; `names`: canonical
    key -> the name that the file uses."""
    mistakes = []
    if values.get(_WEIGHTING) == "documents" and values.get("packing") == "wrapped":
        text = "packing: wrapped joins all documents, so none can be weighted by itself; use packing: true"
        mistakes.append(source.mistake(names[_WEIGHTING], "bad-value", text))
    if values.get(_SMOOTHED) in SWITCHED_OFF:
        return mistakes
    if values.get(_WEIGHTING) == "documents":
        text = f"{_SMOOTHED} is given too, and a smoothed loss is transformers' mean over tokens; keep one of the two"
        mistakes.append(source.mistake(names[_WEIGHTING], "bad-value", text))
    if values.get(_SHARE) not in SWITCHED_OFF:
        text = f"{_SMOOTHED} is given too, and a smoothed loss is made of the logits alone; keep one of the two"
        mistakes.append(source.mistake(names[_SHARE], "bad-value", text))
    return mistakes

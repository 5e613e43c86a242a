"""The keys of a job for the loss, and for noise added in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from planner.keys.fields import Beta, Noise, RouterShare, Switch
from planner.keys.source import SWITCHED_OFF, Mistake, Source

_SMOOTHED, _SHARE, _WEIGHTING = "label_smoothing_factor", "router_aux_loss_coef", "loss_weighting"


class LossKeys(BaseModel):
    """The keys of a job file for the loss and for noise; a base class of `planner.job.schema.Job`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    loss_weighting: Annotated[Literal["tokens", "documents"], Field(description="tokens or documents")] = "tokens"
    label_smoothing_factor: Beta = 0.0
    neftune_noise_alpha: Noise = None
    router_aux_loss_coef: RouterShare = None
    router_aux_loss_mean: Switch = False


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

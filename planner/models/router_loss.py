"""Adds the auxiliary loss of the routers in a mixture of experts, which makes them choose all experts equally often.

transformers' models compute that loss: they count how often each expert is chosen, without the tokens that the
attention mask marks as padding. Rows of a job are padded on the right, where causal attention needs no mask; with a
mask it would run in another kernel. So the mask serves only for that count, and the layers never get it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from planner.errors import Exit, UserError
from planner.job.schema import Job

_ASKS = "output_router_logits"
_TRLS = "router_aux_loss_coef"
_SHARES = (_TRLS, "aux_loss_coef")
"""Attributes of transformers' mixtures of experts that hold the factor of the routers' loss in the model's loss."""


def weighs_routers(job: Job, config: PreTrainedConfig) -> bool:
    """Whether the loss of the job's model includes the auxiliary loss of its routers (mixture of experts). A smoothed
    loss never does: Trainer computes it from the logits only."""
    wanted, text = job.router_aux_loss_coef, config.get_text_config()
    enabled = getattr(text, _ASKS, False) if wanted is None else wanted
    if wanted == "auto" and job.router_aux_loss_mean:  # as in TRL, which looks only for its own name
        enabled = getattr(text, _TRLS, 0.0)
    return bool(enabled) and not job.label_smoothing_factor and not job.rewards and _may_ask(config)


def set_router_loss(model: nn.Module, job: Job) -> None:
    """Let `model` (perhaps wrapped by peft) add the auxiliary loss of its routers, with the factor that the job sets.
    Raises UserError if the job sets a factor and the model has no such loss."""
    causal: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    wanted = 0.0 if job.label_smoothing_factor else job.router_aux_loss_coef
    shares = {name: share for name in _SHARES if isinstance(share := getattr(causal, name, None), (int, float))}
    if isinstance(wanted, float) and wanted and not (shares and _may_ask(causal.config)):
        raise UserError(
            f"{job.model} has no auxiliary loss of routers.",
            code="no-router-loss",
            exit_code=Exit.USAGE,
            numbers=(f"router_aux_loss_coef: {wanted:g}",),
            hint="leave router_aux_loss_coef out",
        )
    if isinstance(wanted, float):
        shares = dict.fromkeys(shares, wanted)
    for name, share in shares.items():
        setattr(causal, name, share)
    if weighs_routers(job, causal.config):
        # Not through the config: it is written with the model, and whoever generates text with it would compute the
        # loss.
        model.register_forward_pre_hook(_asking, with_kwargs=True)
        causal.base_model.register_forward_pre_hook(_without_mask, with_kwargs=True)
        if job.router_aux_loss_mean:
            model.register_forward_pre_hook(_divided(causal, shares, job.gradient_accumulation_steps))


def _may_ask(config: PreTrainedConfig) -> bool:
    """Whether the model of this config has an auxiliary loss and adds it on request. Some models return their routers'
    logits, but have no such loss."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or _ASKS not in inspect.signature(cls.forward).parameters:
        return False
    return hasattr(import_module(cls.__module__), "load_balancing_loss_func")


def _divided(causal: nn.Module, shares: Mapping[str, float], slices: int) -> Callable[[nn.Module, Any], None]:
    """A hook that, like TRL, divides the factors `shares` by the number of a training step's micro-batches, but not in
    an evaluation."""

    def divide(module: nn.Module, _: object) -> None:
        for name, share in shares.items():
            setattr(causal, name, share / slices if module.training else share)

    return divide


def _asking(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    return (args, {**kwargs, _ASKS: True}) if kwargs.get("labels") is not None else None


def _without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Drops the attention mask if the routers' loss is asked for. Generation, which pads on the left, does not ask for
    it."""
    return (args, {**kwargs, "attention_mask": None}) if kwargs.get(_ASKS) else None

"""The auxiliary loss of a mixture's routers, which has experts chosen alike, as transformers' models add it to theirs.

Their code counts how often each expert is chosen, and leaves out the tokens that the attention mask says are padding.
Rows of a job are padded on the right, where causal attention needs no mask, and with one it would run in another
kernel: so the mask is for that count alone, and the layers never get it.
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
"""Names that transformers' mixtures have for how much of the routers' loss they add to the model's."""


def weighs_routers(job: Job, config: PreTrainedConfig) -> bool:
    """Whether the loss of the job's model has its routers' in it. A smoothed one never has: Trainer makes it of the
    logits only."""
    wanted, text = job.router_aux_loss_coef, config.get_text_config()
    asked = getattr(text, _ASKS, False) if wanted is None else wanted
    if wanted == "auto" and job.router_aux_loss_mean:  # TRL's, which looks for its own name of it alone
        asked = getattr(text, _TRLS, 0.0)
    return bool(asked) and not job.label_smoothing_factor and _may_ask(config)


def set_router_loss(model: nn.Module, job: Job) -> None:
    """Have `model` (peft's, where it has adapters) add its routers' loss as the job says. Raises UserError where it has
    none to add."""
    causal: Any = cast(Any, model).get_base_model() if hasattr(model, "get_base_model") else model
    wanted = 0.0 if job.label_smoothing_factor else job.router_aux_loss_coef
    shares = {name: share for name in _SHARES if isinstance(share := getattr(causal, name, None), (int, float))}
    if isinstance(wanted, float) and wanted and not (shares and _may_ask(causal.config)):
        raise UserError(
            f"{job.model} has no auxiliary loss of routers.", code="no-router-loss", exit_code=Exit.USAGE,
            numbers=(f"router_aux_loss_coef: {wanted:g}",), hint="leave router_aux_loss_coef out",
        )  # fmt: skip
    if isinstance(wanted, float):
        shares = dict.fromkeys(shares, wanted)
    for name, share in shares.items():
        setattr(causal, name, share)
    if weighs_routers(job, causal.config):
        # Not by the config: it is written with the model, and whoever generates with that would compute the loss, too.
        model.register_forward_pre_hook(_asking, with_kwargs=True)
        causal.base_model.register_forward_pre_hook(_without_mask, with_kwargs=True)
        if job.router_aux_loss_mean:
            model.register_forward_pre_hook(_divided(causal, shares, job.gradient_accumulation_steps))


def _may_ask(config: PreTrainedConfig) -> bool:
    """Whether the model of this config has an auxiliary loss, and adds it where it is asked to. Some that answer with
    their routers' logits have none."""
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or _ASKS not in inspect.signature(cls.forward).parameters:
        return False
    return hasattr(import_module(cls.__module__), "load_balancing_loss_func")


def _divided(causal: nn.Module, shares: Mapping[str, float], slices: int) -> Callable[[nn.Module, Any], None]:
    """A hook that divides the shares as TRL does: in a step by its micro-batches, in an evaluation not at all."""

    def divide(module: nn.Module, _: object) -> None:
        for name, share in shares.items():
            setattr(causal, name, share / slices if module.training else share)

    return divide


def _asking(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    return (args, {**kwargs, _ASKS: True}) if kwargs.get("labels") is not None else None


def _without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """What is generated is padded on the left, and asks for no routers."""
    return (args, {**kwargs, "attention_mask": None}) if kwargs.get(_ASKS) else None

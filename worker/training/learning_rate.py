"""The learning rate of a step, and the optimizer: the values of transformers' Trainer, as pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from planner.job.schema import Job
from planner.job.values import MUON
from planner.measure.tensors import matrix_names
from worker.runtime.step_values import AdamW, Group, Muon

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def warmup_steps(job: Job, total_steps: int) -> int:
    """Steps of warm-up; `job.warmup_steps` below 1 is a share of all steps, rounded up."""
    warmup = job.warmup_steps
    return int(warmup) if warmup >= 1 else math.ceil(total_steps * warmup)


def learning_rate(job: Job, step: int, total_steps: int) -> float:
    """The rate of step `step` (from 0): that of `transformers.get_scheduler`.

    As there, `constant` has no warm-up, and the first step of a warm-up has rate 0.
    """
    return job.learning_rate * _share_of(job, step, total_steps)


def learning_rates(job: Job, step: int, total_steps: int) -> float | tuple[float, ...]:
    """Likewise, as an engine takes it: one of each group of `optimizer_of` where these have their own."""
    share = _share_of(job, step, total_steps)
    highest = _highest(job)
    return highest[0] * share if len(highest) == 1 else tuple(rate * share for rate in highest)


def _highest(job: Job) -> tuple[float, ...]:
    """The rates that a schedule has shares of: of all groups, or of each."""
    if job.loraplus_lr_ratio is not None:
        return job.learning_rate, job.loraplus_lr_embedding, job.learning_rate * job.loraplus_lr_ratio
    if job.embedding_lr_scale is not None:
        return job.learning_rate, job.learning_rate * job.embedding_lr_scale
    return (job.learning_rate,) if job.embedding_lr is None else (job.learning_rate, job.embedding_lr)


def _share_of(job: Job, step: int, total_steps: int) -> float:
    kwargs = tuple(sorted((job.lr_scheduler_kwargs or {}).items()))
    share = _shares(
        job.lr_scheduler_type, job.learning_rate, warmup_steps(job, total_steps), total_steps, kwargs
    )  # fmt: skip
    return share(step)


@cache
def _shares(
    schedule: str, highest: float, warmup: int, total_steps: int, kwargs: tuple[tuple[str, int | float | str], ...]
) -> Callable[[int], float]:
    """Step -> its share of the highest rate, by transformers' own function."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=highest)
    scheduler = get_scheduler(schedule, optimizer, warmup, total_steps, dict(kwargs))
    assert isinstance(scheduler, LambdaLR)
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    return share


def decay_names(model: nn.Module) -> frozenset[str]:
    """Names (as in `named_parameters()`) of the parameters that weight decay applies to.

    All but biases and the weights of norms, told by `nn.LayerNorm` and by name, as in transformers'
    `Trainer.get_decay_parameter_names`.
    """
    owners = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0] not in owners and not _NO_DECAY.search(name.lower())
    )


def optimizer_of(job: Job, model: nn.Module) -> tuple[Group, ...]:
    """The job's optimizer for the parameters of `model`, in one group, with Muon for matrices in two, or one for each
    of the job's rates."""
    adamw = AdamW(
        betas=(job.adam_beta1, job.adam_beta2), eps=job.adam_epsilon, weight_decay=job.weight_decay,
        decay_names=decay_names(model),
    )  # fmt: skip
    if job.loraplus_lr_ratio is not None:
        return _loraplus(job, adamw, model)
    if len(_highest(job)) > 1:
        return _embeddings_apart(adamw, model)
    if job.optim != MUON:
        return (adamw,)
    matrices = matrix_names(model)
    rest = frozenset(name for name, _ in model.named_parameters()) - matrices
    muon = Muon(
        weight_decay=job.weight_decay, decay_names=adamw.decay_names, names=matrices, adjust=job.muon_adjust_lr_fn
    )
    return (replace(adamw, names=rest), muon)


def _loraplus(job: Job, adamw: AdamW, model: nn.Module) -> tuple[Group, ...]:
    """LoRA+ (Hayou et al., 2024) in the groups that peft has: matrices A and what is trained as a whole, adapters of
    embeddings, and matrices B with all that has one dimension."""
    from peft.optimizers import create_loraplus_optimizer

    made = create_loraplus_optimizer(
        cast(Any, model), torch.optim.AdamW, lr=job.learning_rate, loraplus_lr_ratio=cast(float, job.loraplus_lr_ratio),
        loraplus_lr_embedding=job.loraplus_lr_embedding, loraplus_weight_decay=job.weight_decay,
    )  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first, embedding, second, still = (frozenset(names[id(p)] for p in g["params"]) for g in made.param_groups)
    decay = first | embedding | second
    return tuple(replace(adamw, names=own, decay_names=own & decay) for own in (first, embedding, second | still))


def _embeddings_apart(adamw: AdamW, model: nn.Module) -> tuple[Group, ...]:
    """As axolotl divides them: embedding, head and, of adapters, modules trained as a whole do not decay."""
    names = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    apart = frozenset(
        name for name in names if name.endswith("modules_to_save.default.weight") or "embed_tokens" in name
        or "lm_head" in name
    )  # fmt: skip
    return replace(adamw, names=names - apart), replace(adamw, names=apart, decay_names=frozenset())

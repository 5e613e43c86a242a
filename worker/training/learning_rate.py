"""Computes the learning rate of a step, and the optimizer's settings, with the values of transformers' Trainer, as pure
functions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from planner.job.schema import Job
from planner.models.learning_rates import embedding_names, loraplus_names
from planner.optimizers.adamw import AdamWGroup
from planner.optimizers.base import Group
from planner.optimizers.table import OPTIMIZERS

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def warmup_steps(job: Job, total_steps: int) -> int:
    """The number of warm-up steps. A `job.warmup_steps` below 1 is a share of `total_steps`, rounded up."""
    warmup = job.warmup_steps
    return int(warmup) if warmup >= 1 else math.ceil(total_steps * warmup)


def learning_rate(job: Job, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0), as `transformers.get_scheduler` gives it.

    As there, `constant` has no warm-up, and the first step of a warm-up has rate 0."""
    return job.learning_rate * _share_of(job, step, total_steps)


def learning_rates(job: Job, step: int, total_steps: int) -> float | tuple[float, ...]:
    """The learning rate of step `step` (from 0) in the form that an engine takes: one number, or one for each parameter
    group of `optimizer_of` if the groups have rates of their own."""
    share = _share_of(job, step, total_steps)
    highest = _highest(job)
    return highest[0] * share if len(highest) == 1 else tuple(rate * share for rate in highest)


def _highest(job: Job) -> tuple[float, ...]:
    """The highest rates, of which the schedule takes a share: one for all groups, or one for each."""
    if job.loraplus_lr_ratio is not None:
        return job.learning_rate, job.loraplus_lr_embedding, job.learning_rate * job.loraplus_lr_ratio
    if job.embedding_lr_scale is not None:
        return job.learning_rate, job.learning_rate * job.embedding_lr_scale
    return (job.learning_rate,) if job.embedding_lr is None else (job.learning_rate, job.embedding_lr)


def _share_of(job: Job, step: int, total_steps: int) -> float:
    kwargs = tuple(sorted((job.lr_scheduler_kwargs or {}).items()))
    share = _shares(job.lr_scheduler_type, job.learning_rate, warmup_steps(job, total_steps), total_steps, kwargs)
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
    """The names (as in `named_parameters()`) of the parameters that weight decay applies to.

    These are all but biases and the weights of norms, recognized by `nn.LayerNorm` and by name, as in transformers'
    `Trainer.get_decay_parameter_names`."""
    owners = {name: module for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name.rpartition(".")[0] not in owners and not _NO_DECAY.search(name.lower())
    )


def _trained(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def optimizer_of(job: Job, model: nn.Module) -> tuple[Group, ...]:
    """The settings of the job's optimizer for the parameters of `model`, as parameter groups. Where the job has several
    learning rates there is a group for each of them."""
    adamw = AdamWGroup(
        betas=(job.adam_beta1, job.adam_beta2),
        eps=job.adam_epsilon,
        weight_decay=job.weight_decay,
        decay_names=_trained(model) if job.decay_all else decay_names(model),
    )
    if job.loraplus_lr_ratio is not None:
        return _loraplus(adamw, model)
    if len(_highest(job)) > 1:
        return _embeddings_apart(adamw, model)
    kind = OPTIMIZERS[job.optim]
    return kind.groups(adamw, model, {key: getattr(job, key) for key in kind.keys})


def _loraplus(adamw: AdamWGroup, model: nn.Module) -> tuple[Group, ...]:
    """The groups of LoRA+, with weight decay as in peft: on all but some parameters of one dimension."""
    first, embedding, second, still = loraplus_names(model)
    decay = first | embedding | second
    return tuple(replace(adamw, names=names, decay_names=names & decay) for names in (first, embedding, second | still))


def _embeddings_apart(adamw: AdamWGroup, model: nn.Module) -> tuple[Group, ...]:
    """Two groups as in axolotl: the embeddings, which have their own rate and no weight decay, and all else."""
    names, apart = frozenset(name for name, p in model.named_parameters() if p.requires_grad), embedding_names(model)
    return replace(adamw, names=names - apart), replace(adamw, names=apart, decay_names=frozenset())

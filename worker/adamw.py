"""AdamW(fused=True) on single tensors: PyTorch's own kernel, called as PyTorch calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.optimizer import AdamW


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A tensor to update, with everything the update reads, on one device.

    `work` is the copy that computes; `master` its fp32 original, `work` itself where that is fp32.
    """

    name: str
    work: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    gradient: Tensor


def update(
    targets: Sequence[Target], optimizer: AdamW, *, learning_rate: float, count: Tensor, coefficient: Tensor | None
) -> None:
    """One AdamW step on `targets`; `count` is the step's number. An fp32 gradient is scaled in place.

    The kernel is called with lists, never with concatenations: the last elements of each tensor take another path.
    """
    for batch in _batches(targets):
        gradients = [t.gradient.float() for t in batch]  # the same tensor when it is fp32
        if coefficient is not None:
            torch._foreach_mul_(gradients, coefficient)
        for decay in dict.fromkeys(optimizer.decay_of(t.name) for t in batch):
            chosen = [i for i, t in enumerate(batch) if optimizer.decay_of(t.name) == decay]
            torch._fused_adamw_(
                [batch[i].master for i in chosen],
                [gradients[i] for i in chosen],
                [batch[i].exp_avg for i in chosen],
                [batch[i].exp_avg_sq for i in chosen],
                [],
                [count] * len(chosen),
                lr=learning_rate,
                beta1=optimizer.betas[0],
                beta2=optimizer.betas[1],
                weight_decay=decay,
                eps=optimizer.eps,
                amsgrad=False,
                maximize=False,
            )
        del gradients
        for target in batch:
            if target.work is not target.master:
                target.work.copy_(target.master)


def _batches(targets: Sequence[Target]) -> Iterator[Sequence[Target]]:
    """Targets that are updated in one call: together their fp32 gradients are not larger than the largest one alone,
    which is what the plan has memory for. Gradients that are fp32 already need no copy."""
    sizes = [t.master.nbytes if t.gradient.dtype != torch.float32 else 0 for t in targets]
    limit, start, total = max(sizes, default=0), 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit:
            yield targets[start:i]
            start, total = i, 0
        total += size
    yield targets[start:]

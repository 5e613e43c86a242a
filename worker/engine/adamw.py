"""AdamW(fused=True) on single tensors, on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from planner.cpu.adamw import Step, Target, cpu_kernel, fused, update_rounded
from planner.cpu.rounded import Numbers
from planner.eight_bits import CHUNK

Known = tuple[Numbers, Numbers] | None


def update(targets: Sequence[Target], step: Step, known: Known = None) -> None:
    """One AdamW step on `targets`, all of them on one device. `known`: what bytes stand for, on the device, where
    moments are in 8 bits."""
    if targets and targets[0].master.device.type == "cpu":
        cpu_kernel().update(targets, step)
    else:
        update_in_lists(targets, step, known)


def update_in_lists(targets: Sequence[Target], step: Step, known: Known = None) -> None:
    """The same by PyTorch's kernel, in as few calls as memory allows: each starts work on the GPU. A gradient as wide
    as the master is scaled in place.

    With lists, never with concatenations: the last elements of each tensor take another path. Those whose moments are
    in 8 bits come last, one after the other, in chunks.
    """
    for batch in _batches([target for target in targets if not target.rounded]):
        gradients = [t.gradient.to(t.master.dtype) for t in batch]  # the same tensor where it is as wide
        if step.coefficient is not None:
            torch._foreach_mul_(gradients, step.coefficient)
        for decay in dict.fromkeys(t.weight_decay for t in batch):
            chosen = [i for i, t in enumerate(batch) if t.weight_decay == decay]
            fused(
                [batch[i].master for i in chosen], [gradients[i] for i in chosen], [batch[i].exp_avg for i in chosen],
                [batch[i].exp_avg_sq for i in chosen], step, decay,
            )  # fmt: skip
        del gradients
        for target in batch:
            if target.work is not target.master:
                target.work.copy_(target.master)
    for target in (target for target in targets if target.rounded):
        assert known is not None
        update_rounded(target, step, CHUNK, known)


def _batches(targets: Sequence[Target]) -> Iterator[Sequence[Target]]:
    """Targets that are updated in one call: together their fp32 gradients are not larger than the largest one alone,
    which is what the plan has memory for. Gradients as wide as the master need no copy."""
    sizes = [t.master.nbytes if t.gradient.dtype != t.master.dtype else 0 for t in targets]
    limit, start, total = max(sizes, default=0), 0, 0
    for i, size in enumerate(sizes):
        if total + size > limit:
            yield targets[start:i]
            start, total = i, 0
        total += size
    if targets:
        yield targets[start:]

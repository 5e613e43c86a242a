"""A training loop of one's own, with the engine and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.support.tiny_models import make_model
from worker.api import LoopEngine, prepare
from worker.data.seeds import micro_batch_seed

BUDGET = "5MB"

Scheduler = Callable[[torch.optim.Optimizer], object]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Large enough that tensors are worth moving: 2.5 MB of weights."""
    return make_model("llama", dtype, width=128, layers=4)


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Groups that differ in everything."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "mlp" in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
        {"params": [p for n, p in named if "mlp" not in n and "norm" not in n], "lr": 2e-2, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), fused=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def engine_of(model: nn.Module, optimizer: torch.optim.AdamW, batch: object, **settings: object) -> LoopEngine:
    return prepare(
        model, batch, optimizer=optimizer, device="cpu", measure=False,
        **{"gpu_budget": BUDGET, "max_grad_norm": 0.5, **settings},
    )  # fmt: skip


def plain_loop(
    model: nn.Module, steps: Sequence[Sequence[dict[str, Tensor]]], *,
    make_optimizer: Callable[[nn.Module], torch.optim.AdamW] = optimizer_of, make_schedule: Scheduler = schedule_of,
    clip: float | None = 0.5, first: int = 0,
) -> list[Tensor]:  # fmt: skip
    """What one would write without offmate; the losses. Weights narrower than fp32 have fp32 masters. `first`: the
    number of the first of `steps`."""
    weights = list(model.parameters())
    masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in weights]
    optimizer = make_optimizer(model)
    twin = dict(zip(weights, masters, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [twin[p] for p in group["params"]]
    schedule, out = make_schedule(optimizer), []
    for number, batches in enumerate(steps, start=first):
        items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
        rest = {} if len(batches) == 1 else {"num_items_in_batch": items}
        losses = []
        for k, batch in enumerate(batches):
            torch.manual_seed(micro_batch_seed(7, number, k))
            losses.append(model(**batch, **rest).loss)
            losses[-1].backward()
        for weight, master in twin.items():
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in twin.items():
                if master is not weight:
                    weight.copy_(master)
        schedule.step()
        out.append(torch.stack(losses).sum().detach())
    return out


def equal(one: nn.Module, other: nn.Module) -> bool:
    """The same parameters, bit for bit."""
    parameters = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(p, q) for (a, p), (b, q) in parameters)

"""A training loop of one's own, with the engine and in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from planner.graph.block_code import BlockCode
from planner.measure.analysis import Analysis, analyse_model
from planner.search.problem import Problem
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
    """What `prepare` gives; where the model is as it was made, with the analysis and the code of an earlier one that is
    alike: those have tests of their own. So has the planner, which is asked each question once."""
    known = not any(_is_changed(module) for module in model.modules())
    kept = _kept.setdefault(_traits(model), Kept()) if known else Kept()
    with patch("worker.api.analyse_model", kept.analyse), patch.object(Problem, "plan", _planned):
        engine = prepare(
            model,
            batch,
            optimizer=optimizer,
            device="cpu",
            measure=False,
            **{"gpu_budget": BUDGET, "max_grad_norm": 0.5, **settings},
        )
    engine._engine._rounds.codes = kept.codes
    return engine


class Kept:
    """What is known of models that are alike."""

    def __init__(self) -> None:
        self.codes: dict[Hashable, BlockCode] = {}
        self._analyses: dict[object, Analysis] = {}

    def analyse(self, model: nn.Module, batch: Mapping[str, Tensor], **settings: object) -> Analysis:
        key = repr(settings), tuple((name, tensor.shape) for name, tensor in batch.items())
        if key not in self._analyses:
            self._analyses[key] = analyse_model(model, batch, **settings)
        return replace(self._analyses[key], model=model, batch=batch)


_kept: dict[object, Kept] = {}
_planned = functools.cache(Problem.plan)


def _traits(model: nn.Module) -> object:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    return (
        repr(model),
        repr(getattr(model, "config", None)),
        tuple(m.training for m in model.modules()),
        tuple((name, first[id(t)], t.shape, t.stride(), t.dtype, t.requires_grad) for name, t in tensors),
    )


def _is_changed(module: nn.Module) -> bool:
    """Whether a test has put something of its own into it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or any(callable(value) for value in vars(module).values())


def plain_loop(
    model: nn.Module,
    steps: Sequence[Sequence[dict[str, Tensor]]],
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.AdamW] = optimizer_of,
    make_schedule: Scheduler = schedule_of,
    clip: float | None = 0.5,
    first: int = 0,
) -> list[Tensor]:
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

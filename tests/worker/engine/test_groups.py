"""Parameter groups whose values change from step to step, against torch.optim.AdamW(fused=True) with the same ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.engine_plans import chain_of, mixed_plan
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine
from worker.torch_optimizers import TorchOptimizers

STEPS = 4


def optimizer_of(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    """Three groups; one begins with a momentum on the other side of a half, where the moment's formula is another."""
    groups = [
        {"params": [p for n, p in parameters if "mlp" in n], "betas": (0.4, 0.9)},
        {"params": [p for n, p in parameters if "norm" in n], "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
        {"params": [p for n, p in parameters if "mlp" not in n and "norm" not in n]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1, fused=True)


def change(optimizer: torch.optim.AdamW, step: int) -> None:
    """Every value of every group, each in its own way; back and forth, so that an old value is no good guess."""
    for number, group in enumerate(optimizer.param_groups):
        sign = (-1) ** (step + number)
        group["lr"] *= 1 + 0.4 * sign
        group["betas"] = (group["betas"][0] + 0.05 * sign, group["betas"][1] + 0.01 * sign)
        group["eps"] *= 3.0**sign
        group["weight_decay"] += 0.05 * (step + number)


def plain(model: nn.Module, batches: list[list[dict]], *, clip: float | None) -> list[dict[str, torch.Tensor]]:
    """The masters after each step, in plain PyTorch."""
    weights = dict(model.named_parameters())
    masters = {n: nn.Parameter(p.detach().float()) if p.dtype != torch.float32 else p for n, p in weights.items()}
    optimizer, found = optimizer_of(list(masters.items())), []
    for step, slices in enumerate(batches):
        for k, batch in enumerate(slices):
            torch.manual_seed(10 * step + k)
            model(**batch, num_items_in_batch=torch.tensor(30 * len(slices))).loss.backward()
        for name, master in masters.items():
            if master is not weights[name]:
                master.grad, weights[name].grad = weights[name].grad.float(), None
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                if master is not weights[name]:
                    weights[name].copy_(master)
        change(optimizer, step)
        found.append({name: master.detach().clone() for name, master in masters.items()})
    return found


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("clip", "plan"),
    [
        (None, {}),  # one layer's updates run beside the next step's forward, with the values of their own
        (0.05, {}),
        (0.05, {"ahead": True}),  # done once more when the norm is known
        (1e9, {"ahead": True}),
        (None, {"slices": 2, "rounds": 2}),
        (0.05, {"slices": 2, "rounds": 2}),
    ],
    ids=["alone", "clipped", "ahead, clipped", "ahead", "rounds", "rounds, clipped"],
)
def test_values_of_groups_that_change_at_every_step_are_those_of_plain_pytorch(
    dtype: torch.dtype, clip: float | None, plan: dict
) -> None:
    count = plan.get("slices", 1) * plan.get("rounds", 1)
    batches = [[batch_of(10 * n + k) for k in range(count)] for n in range(STEPS)]
    expected = plain(make_model("llama", dtype), batches, clip=clip)
    model = make_model("llama", dtype)
    chain = chain_of(model)
    optimizer = optimizer_of(list(model.named_parameters()))
    adamw = TorchOptimizers(optimizer, model)
    engine = Engine(
        model,
        plan=mixed_plan(chain, clip=clip is not None, **plan),
        chain=chain,
        optimizer=adamw.settings(),
        max_grad_norm=clip,
        device=torch.device("cpu"),
    )
    for step, slices in enumerate(batches):
        engine.step(
            slices,
            seeds=[10 * step + k for k in range(count)],
            learning_rate=adamw.learning_rates(),
            optimizer=adamw.settings(),
            num_items_in_batch=torch.tensor(30 * count),
        )
        change(optimizer, step)
    state = {name: parts["master"].clone() for name, parts in engine.state()}
    assert [name for name in state if not torch.equal(state[name], expected[-1][name])] == []
    engine.close()

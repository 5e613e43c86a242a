"""Whatever torch's schedulers change in an optimizer's groups, and what a user changes there, counts at each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from planner.errors import UserError
from tests.support.own_loop import engine_of, equal, model_of, optimizer_of, plain_loop
from tests.support.tiny_models import batch_of

STEPS = 4


def decay_that_grows(optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """Weight decay that follows the steps, as self-supervised training has it."""

    def step() -> None:
        for number, group in enumerate(optimizer.param_groups):
            group["weight_decay"] += 0.1 * (number + 1)

    return SimpleNamespace(step=step)


def everything(optimizer: torch.optim.Optimizer) -> SimpleNamespace:
    """Values of other types, too."""

    def step() -> None:
        for number, group in enumerate(optimizer.param_groups):
            group.update(lr=torch.tensor(1e-2 / (number + 2)), betas=[0.6 - 0.2 * number, 0.97], eps=1e-5)

    return SimpleNamespace(step=step)


SCHEDULERS = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=STEPS + 1),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, step_size_up=2, base_momentum=0.3, max_momentum=0.95),
    "weight decay": decay_that_grows,
    "all values": everything,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_of_any_value_gives_the_numbers_of_plain_pytorch(scheduler: str, dtype: torch.dtype) -> None:
    make: Callable[[torch.optim.Optimizer], object] = SCHEDULERS[scheduler]
    slices = 2 if scheduler == "one cycle" else 1
    steps = [[batch_of(10 * n + k) for k in range(slices)] for n in range(STEPS)]
    plain, model = model_of(dtype), model_of(dtype)
    expected = plain_loop(plain, steps, make_schedule=make)
    optimizer = optimizer_of(model)
    schedule = make(optimizer)
    budget = "5MB" if dtype == torch.float32 else "3MB"
    engine = engine_of(model, optimizer, steps[0], seed=7, gpu_budget=budget)
    updates = {side for stage in engine.plan.stages for side in ("cpu_update", "gpu_update") if getattr(stage, side)}
    assert updates == {"cpu_update", "gpu_update"}, "updates on one side only: the test shows half"
    for batches, loss in zip(steps, expected, strict=True):
        assert torch.equal(engine.step(batches), loss)
        schedule.step()
    assert equal(engine.restore(), plain)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fused": False}, "it is not fused"),
        ({"fused": None, "foreach": True}, "it is not fused"),
        ({"amsgrad": True}, "it has amsgrad=True"),
        ({"maximize": True}, "it has maximize=True"),
        ({"differentiable": True}, "it has differentiable=True"),
        ({"decoupled_weight_decay": False}, "its weight decay is not decoupled"),
        ({"betas": (1.0, 0.9)}, r"its betas are 1\.0 and 0\.9"),
        ({"lr": -1e-3}, r"its lr is -0\.001"),
        ({"lr": float("nan")}, "its lr is nan"),
        ({"weight_decay": -0.1}, r"its weight_decay is -0\.1"),
    ],
    ids=str,
)
def test_a_value_that_the_engine_cannot_keep_to_is_refused_at_the_step_and_harms_nothing(
    change: dict, text: str
) -> None:
    plain, model = model_of(), model_of()
    expected = plain_loop(plain, [[batch_of(0)], [batch_of(1)]], make_schedule=everything)
    optimizer = optimizer_of(model)
    schedule = everything(optimizer)
    engine = engine_of(model, optimizer, batch_of(), seed=7)
    assert torch.equal(engine.step(batch_of(0)), expected[0])
    before = dict(optimizer.param_groups[1])
    optimizer.param_groups[1].update(change)
    with pytest.raises(UserError, match=text) as caught:
        engine.step(batch_of(1))
    assert caught.value.code == "optimizer-not-usable"
    optimizer.param_groups[1].update(before)
    schedule.step()
    assert torch.equal(engine.step(batch_of(1)), expected[1])
    assert equal(engine.restore(), plain)


def test_other_parameters_or_moments_than_at_the_start_are_refused() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    engine = engine_of(model, optimizer, batch_of())
    engine.step(batch_of())
    kept = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(UserError, match="its groups have other parameters"):
        engine.step(batch_of())
    optimizer.param_groups[1]["params"].append(kept)  # into another group
    with pytest.raises(UserError, match="its groups have other parameters"):
        engine.step(batch_of())
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    engine.step(batch_of())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(UserError, match="its groups have other parameters"):
        engine.step(batch_of())
    del optimizer.param_groups[-1]
    first = next(iter(model.parameters()))
    optimizer.state[first]["exp_avg"] = torch.zeros(first.shape)
    with pytest.raises(UserError, match="it has moments of steps already"):
        engine.step(batch_of())
    engine.close()


def test_a_state_put_in_the_place_of_the_optimizers_is_refused_but_where_a_run_begins(tmp_path: Path) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    engine = engine_of(model, optimizer, batch_of())
    optimizer.load_state_dict(optimizer.state_dict())  # as one resumes: rates come back, moments by `load`
    engine.step(batch_of())
    kept = optimizer.state_dict()
    engine.save(tmp_path)
    optimizer.load_state_dict(kept)  # in plain PyTorch: no moments any more
    with pytest.raises(UserError, match="its state was replaced"):
        engine.step(batch_of())
    engine.load(tmp_path)
    optimizer.load_state_dict(kept)
    engine.step(batch_of())
    engine.close()

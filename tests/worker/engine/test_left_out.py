"""Weights that no gradient of a step reaches: plain AdamW leaves them alone, and so does the engine."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.engines import CPU, assert_same, assert_same_state, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
STEPS = 6


def choosing(dtype=torch.float32):
    """Each layer has two MLPs, and looks at its input to choose one."""
    model = make_model("llama", dtype)
    for layer in model.model.layers:
        mlp, other = layer.mlp, copy.deepcopy(layer.mlp)
        mlp.add_module("other", other)
        mlp.forward = lambda x, one=mlp.forward, two=other.forward: one(x) if float(x.detach().sum()) > 0 else two(x)
    return model


def build(dtype=torch.float32, *, clip=None, metered=False, **shape):
    plain, model = choosing(dtype), choosing(dtype)
    chain = chain_of(model)
    plan = mixed_plan(chain, clip=clip is not None, **shape)
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=metered, **settings)
    return engine, PlainEngine(plain, **settings)


def left_out(engine):
    return {name: int(parts["left_out"]) for name, parts in engine.state() if "left_out" in parts}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {"slices": 2}),
        (torch.float32, {"slices": 2, "rounds": 2, "clip": 0.5}),
        (torch.float32, {"clip": 1.6, "ahead": True}),
        (torch.bfloat16, {"clip": 1.6, "ahead": True}),
    ],
    ids=["plain", "bf16", "rounds", "ahead", "ahead bf16"],
)
def test_a_weight_without_a_gradient_has_no_step_no_decay_and_no_share_in_the_norm(dtype, shape):
    engine, plain = build(dtype, **shape)
    slices = shape.get("slices", 1) * shape.get("rounds", 1)
    assert_same(run(engine, range(STEPS), slices), run(plain, range(STEPS), slices))
    assert any(0 < count < STEPS for count in left_out(engine).values()), "each was reached in all steps, or in none"
    assert_same_state(engine, plain)
    engine.close()


def test_what_was_left_out_is_part_of_the_state():
    first, plain = build()
    run(first, range(STEPS // 2), 1)
    second, _ = build()
    second.load_state([(name, {k: t.clone() for k, t in parts.items()}) for name, parts in first.state()], step=3)
    assert left_out(second) == left_out(first) != {}
    run(plain, range(STEPS // 2), 1)
    assert_same(run(second, range(STEPS // 2, STEPS), 1), run(plain, range(STEPS // 2, STEPS), 1))
    assert_same_state(second, plain)
    for engine in (first, second):
        engine.close()


def test_a_weight_that_was_not_chosen_does_not_stay_on_the_device():
    engine, _ = build(metered=True)
    batches, rest = data(0, 1)
    peaks = [engine.step(batches, learning_rate=learning_rate(step), **rest).peak_bytes for step in range(4)]
    engine.close()
    assert len(set(peaks[1:])) == 1, peaks
    assert peaks[-1] <= engine._plan.gpu_budget_bytes

"""Engines of tiny models beside plain PyTorch: what tests of the engine share."""

from __future__ import annotations

import functools
import threading

import torch

from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

CPU = torch.device("cpu")
PAIRS = {}  # generated code is shared by kind and shapes; here by all tests, to save time


@functools.cache
def chain_for(name, dtype=torch.float32):
    return chain_of(make_model(name, dtype))


def build(name, plan_of=mixed_plan, *, clip=None, dtype=torch.float32, metered=False, **shape):
    """The engine under `plan_of(chain, clip=…, **shape)`, with plan and chain at hand, and the plain engine."""
    plain, model = make_model(name, dtype), make_model(name, dtype)
    chain = chain_for(name, dtype)
    plan = plan_of(chain, clip=clip is not None, **shape)
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=metered, **settings)
    engine.plan, engine.chain = plan, chain
    engine._rounds.codes = PAIRS
    return engine, PlainEngine(plain, **settings)


def data(step, slices, length=16):
    """Batches, seeds and keyword arguments of one step; the last slice is padded."""
    batches = [batch_of(100 * step + k, length=length, padded=k == slices - 1) for k in range(slices)]
    count = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    return batches, {"seeds": [1000 * step + k for k in range(slices)], "num_items_in_batch": count}


def learning_rate(step):
    return 1e-3 * (step + 1) / 4


def run(engine, steps, slices):
    """Losses and norms of `steps`, as numbers."""
    out = []
    for step in steps:
        batches, rest = data(step, slices)
        result = engine.step(batches, learning_rate=learning_rate(step), **rest)
        norm = None if result.grad_norm is None else result.grad_norm.clone()
        out.append(([loss.clone() for loss in result.losses], norm))
    return out


def own_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("offmate-")]


def assert_same(got, expected):
    for step, ((losses, norm), (plain_losses, plain_norm)) in enumerate(zip(got, expected, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(losses, plain_losses, strict=True)), f"losses of step {step}"
        assert norm is None or torch.equal(norm, plain_norm), f"norm of step {step}"


def assert_same_state(engine, plain):
    expected = {name: {k: t.clone() for k, t in parts.items()} for name, parts in plain.state()}
    found = set()
    for name, parts in engine.state():
        found.add(name)
        assert parts.keys() == expected[name].keys()
        wrong = [k for k, t in parts.items() if not torch.equal(t, expected[name][k])]
        assert not wrong, f"{name}: {wrong}"
    assert found == expected.keys()

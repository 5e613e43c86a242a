"""Engines whose optimizer is not AdamW in fp32 alone, beside plain PyTorch's: what their tests share."""

from __future__ import annotations

from tests.support.engines import CPU
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine


def makers(shapes, optimizer_of, chain_for, codes, plain_keys=lambda model: {}):
    """For a fixture: yields `build(shape, name)`, which gives the engine of the model `name` in one of `shapes` (dtype,
    plan, its keys), with plan and chain at hand, and the plain engine; closes the engines at the end. `codes`: the
    generated code that all of them share."""
    engines = []

    def build(shape, name="llama", **settings):
        dtype, plan_of, keys = shapes[shape]
        model, chain, clip = make_model(name, dtype), chain_for(name, dtype), 0.5 if keys.get("clip") else None
        plan = plan_of(chain, **keys)
        engine = Engine(
            model, plan=plan, chain=chain, device=CPU, optimizer=optimizer_of(model), max_grad_norm=clip, **settings
        )
        engine.plan, engine.chain = plan, chain
        engine._rounds.codes = codes
        engines.append(engine)
        plain = make_model(name, dtype)
        return engine, PlainEngine(plain, optimizer=optimizer_of(plain), max_grad_norm=clip, **plain_keys(plain))

    yield build
    for engine in engines:
        engine.close()

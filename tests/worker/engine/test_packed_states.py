"""Host states of ten bytes a parameter: who has them, that the plan counts them; checkpoints have whole ones."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from planner.schedule.compile import compile_program, packed
from planner.schedule.memory_use import cpu_parts
from tests.support.engine_plans import adamw, mixed_plan
from tests.support.engines import CPU, PAIRS, assert_same, assert_same_state, chain_for, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
BF16 = torch.bfloat16
SHAPES = {"rounds": {"rounds": 2, "slices": 1}, "ahead": {"slices": 2, "ahead": True}}
COUNT = 2  # micro-batches of a step
CLIP = 0.5


@pytest.fixture
def make():
    engines = []

    def build(shape, *, packs=True):
        model = make_model("llama", BF16)
        chain = replace(chain_for("llama", BF16), packs=packs)
        plan = mixed_plan(chain, clip=True, **SHAPES[shape])
        engine = Engine(model, plan=plan, chain=chain, device=CPU, optimizer=adamw(model), max_grad_norm=CLIP)
        engine.plan, engine.chain = plan, chain
        engine._rounds.codes = PAIRS
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def plain():
    model = make_model("llama", BF16)
    return PlainEngine(model, optimizer=adamw(model), max_grad_norm=CLIP)


def saved(engine):
    return [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in engine.state()]


def packed_names(engine):
    return packed(engine.chain, compile_program(engine.plan, engine.chain).ops)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("packs", [True, False], ids=["from packed", "to packed"])
def test_a_checkpoint_of_either_form_goes_on_in_the_other_with_plain_pytorchs_bits(make, plain, shape, packs):
    first, second = make(shape, packs=packs), make(shape, packs=not packs)
    assert bool(packed_names(first)) == packs and bool(packed_names(second)) != packs
    assert_same(run(first, range(2), COUNT), run(plain, range(2), COUNT))
    for engine in (first, first):  # being looked at changes nothing
        assert_same_state(engine, plain)
    second.load_state(saved(first), step=2)
    assert_same_state(second, plain)
    expected = run(plain, range(2, 4), COUNT)
    for engine in (first, second):
        assert_same(run(engine, range(2, 4), COUNT), expected)
        assert_same_state(engine, plain)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_states_take_ten_bytes_a_parameter_as_the_plan_says(make, shape):
    engines = {packs: make(shape, packs=packs) for packs in (True, False)}
    bytes_of = {}
    for packs, engine in engines.items():
        run(engine, range(1), COUNT)
        engine.drain()
        host = engine._weights.host
        items = [t for tensors in (*host.items.values(), *host._spare.values()) for t in tensors]
        slabs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in items}
        planned = cpu_parts(engine.plan, engine.chain).total_bytes
        assert planned <= sum(slabs.values()) <= planned + mmap.PAGESIZE * len(slabs)
        bytes_of[packs] = planned
    names = packed_names(engines[True])
    elements = sum(t.elements for t in engines[True].chain.tensors() if t.name in names)
    assert bytes_of[False] - bytes_of[True] == 2 * elements > 0
    for name in names:
        states = engines[True]._weights.host.items[f"s:{name}"]
        assert [t.element_size() for t in states] == [4, 4, 2]


def test_reading_the_states_leaves_them_packed_whatever_ends_it(make, plain):
    engine = make("rounds")
    assert_same(run(engine, range(1), COUNT), run(plain, range(1), COUNT))
    for name, _ in engine.state():
        if name in packed_names(engine):
            break  # as where a disk is full
    with pytest.raises(ZeroDivisionError):
        for name, _ in engine.state():
            if name in packed_names(engine):
                raise ZeroDivisionError
    assert_same_state(engine, plain)


def test_a_weight_that_no_gradient_reached_stays_as_it_is(make, plain, monkeypatch):
    engine = make("rounds")
    name = min(packed_names(engine))
    run(engine, range(1), COUNT)
    before = dict(saved(engine))[name]
    cpu_update = engine._actions._update_on_cpu
    monkeypatch.setattr(
        engine._actions,
        "_update_on_cpu",
        lambda names, values: (values.reached.discard(name), cpu_update(names, values)),
    )
    batches, rest = data(1, COUNT)
    engine.step(batches, learning_rate=learning_rate(1), **rest)
    engine.drain()
    work = engine._weights.host.items[f"w:{name}"][0].clone()
    after = dict(saved(engine))[name]
    assert all(torch.equal(t, after[key]) for key, t in before.items())
    assert torch.equal(work, before["master"].bfloat16())

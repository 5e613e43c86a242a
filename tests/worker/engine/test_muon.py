"""Muon for matrices: the numbers of torch.optim.Muon beside AdamW in every bit, and their bytes."""

from __future__ import annotations

import functools
import mmap

import pytest
import torch

from planner.optimizers.muon import Muon
from planner.schedule.memory_use import cpu_parts
from tests.support.engine_plans import adamw, chain_of, mixed_plan, muon, resident_plan, streaming_plan
from tests.support.engines import CPU, assert_same, run
from tests.support.optimizer_engines import makers
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine
from worker.storage.shards import read_shards, write_shards

torch.set_num_threads(1)
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = {
    "fp32": (FP32, mixed_plan, {"clip": True}),
    "fp32 not clipped": (FP32, mixed_plan, {"slices": 2}),
    "bf16": (BF16, mixed_plan, {"slices": 2}),
    "bf16 in rounds": (BF16, mixed_plan, {"rounds": 2, "clip": True}),
    "streaming": (BF16, streaming_plan, {}),
    "resident": (BF16, resident_plan, {"clip": True}),
}
"""Updates on the CPU, on the device with states that travel or stay, of accumulated gradients."""
CODES = {}


@functools.cache
def chain_for(name, dtype):
    model = make_model(name, dtype)
    return chain_of(model, optimizers=Muon.chosen(model))


@pytest.fixture
def make():
    yield from makers(SHAPES, muon, chain_for, CODES)


def count_of(engine):
    return engine.plan.slices * engine.plan.rounds


def saved(engine):
    return {name: {key: t.clone() for key, t in parts.items()} for name, parts in engine.state()}


def differences(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(found[name].keys() == wanted[name].keys() for name in found)
    parts = [(name, part) for name in found for part in found[name]]
    return [(name, part) for name, part in parts if not torch.equal(found[name][part], wanted[name][part])]


@pytest.mark.parametrize(("shape", "name"), [*((shape, "llama") for shape in SHAPES), ("bf16", "gpt2")])
def test_steps_equal_those_of_pytorchs_muon_beside_adamw(make, shape, name):
    engine, plain = make(shape, name)
    assert_same(run(engine, range(4), count_of(engine)), run(plain, range(4), count_of(engine)))
    found = saved(engine)
    assert not differences(found, dict(plain.state()))
    matrices = {name for name, parts in found.items() if "momentum_buffer" in parts}
    assert matrices == set(Muon.chosen(engine._model)) and 0 < len(matrices) < len(found)


@pytest.mark.parametrize("shape", ["fp32", "bf16 in rounds", "resident"])
def test_a_run_that_goes_on_from_what_was_saved_has_every_bit(make, shape, tmp_path):
    (first, _), (second, _) = make(shape), make(shape)
    count = count_of(first)
    run(first, range(2), count)
    second.load_state(read_shards(write_shards(tmp_path, "state", first.state())), step=2)
    assert_same(run(second, range(2, 4), count), run(first, range(2, 4), count))
    assert not differences(saved(second), saved(first))


def test_moments_of_adamw_are_not_taken_for_a_momentum(make):
    engine, _ = make("bf16")
    plain = PlainEngine(make_model("llama", BF16), optimizer=adamw(make_model("llama", BF16)), max_grad_norm=None)
    run(plain, range(1), 2)
    with pytest.raises(ValueError, match=r"momentum_buffer of .* is not there"):
        engine.load_state(plain.state(), step=1)


def test_an_optimizer_of_other_matrices_than_the_chains_is_refused():
    model, chain = make_model("llama", BF16), chain_for("llama", BF16)
    with pytest.raises(ValueError, match="the optimizer's groups are not the chain's"):
        Engine(model, plan=resident_plan(chain), chain=chain, device=CPU, optimizer=adamw(model), max_grad_norm=None)


@pytest.mark.parametrize("shape", ["fp32", "bf16", "bf16 in rounds"])
def test_states_take_on_the_host_what_the_plan_says(make, shape):
    engine, _ = make(shape)
    run(engine, range(1), count_of(engine))
    engine.drain()
    slabs = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for own in engine._weights.host.items.values()
        for t in own
    }
    planned = cpu_parts(engine.plan, engine.chain)
    kept = planned.total_bytes - planned.products_bytes
    assert planned.products_bytes and kept <= sum(slabs.values()) <= kept + mmap.PAGESIZE * len(slabs)
    matrices = [t for t in engine.chain.tensors() if isinstance(t.optimizer, Muon)]
    master = 4 * (SHAPES[shape][0] is BF16)
    assert matrices and all(t.state_bytes == (4 + master) * t.elements for t in matrices)


@pytest.mark.parametrize("shape", ["fp32", "bf16 in rounds", "streaming", "resident"])
def test_the_device_never_holds_more_than_planned(make, shape):
    engine, _ = make(shape, metered=True)
    for step in range(2):
        (*_,) = run(engine, range(step, step + 1), count_of(engine))
        assert engine._machine.peak_bytes() <= engine.plan.gpu_budget_bytes

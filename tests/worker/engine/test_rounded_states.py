"""Moments in 8 bits: the numbers of AdamW whose moments are rounded after each step, in every bit, and their bytes."""

from __future__ import annotations

import functools
import mmap

import pytest
import torch

from planner.optimizers.adamw_8bit import AdamW8bit
from planner.schedule.memory_use import cpu_parts
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan, rounded_of
from tests.support.engines import assert_same, run
from tests.support.optimizer_engines import makers
from tests.support.tiny_models import make_model
from worker.storage.shards import read_shards, write_shards

torch.set_num_threads(1)
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = {
    "fp32": (FP32, mixed_plan, {"clip": True}),
    "bf16": (BF16, mixed_plan, {"slices": 2}),
    "bf16 in rounds": (BF16, mixed_plan, {"rounds": 2, "clip": True}),
    "ahead of the norm": (BF16, mixed_plan, {"clip": True, "ahead": True}),
    "fp32 ahead of the norm": (FP32, mixed_plan, {"clip": True, "ahead": True}),
    "resident": (BF16, resident_plan, {"clip": True}),
}
"""Updates on the CPU in place, on the device with states that travel or stay, and into other memory."""
CODES = {}


@functools.cache
def chain_for(name, dtype):
    model = make_model(name, dtype)
    return chain_of(model, optimizers=rounded_of(model))


@pytest.fixture
def make():
    yield from makers(SHAPES, adamw, chain_for, CODES, lambda plain: {"rounded": rounded_of(plain)})


def count_of(engine):
    return engine.plan.slices * engine.plan.rounds


def saved(engine):
    return [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in engine.state()]


def assert_same_state(engine, plain):
    wanted = dict(plain.state())
    for name, parts in saved(engine):
        found = AdamW8bit().in_fp32(parts)
        assert found.keys() == wanted[name].keys()
        assert not [part for part, tensor in found.items() if not torch.equal(tensor, wanted[name][part])], name


@pytest.mark.parametrize(("shape", "name"), [*((shape, "llama") for shape in SHAPES), ("bf16", "gpt2")])
def test_steps_equal_those_of_adamw_with_moments_rounded_after_each(make, shape, name):
    engine, plain = make(shape, name)
    assert_same(run(engine, range(4), count_of(engine)), run(plain, range(4), count_of(engine)))
    assert_same_state(engine, plain)


@pytest.mark.parametrize("shape", ["fp32", "bf16 in rounds", "resident"])
def test_a_run_that_goes_on_from_what_was_saved_has_every_bit(make, shape, tmp_path):
    (first, _), (second, _) = make(shape), make(shape)
    count = count_of(first)
    run(first, range(2), count)
    files = write_shards(tmp_path, "state", first.state())
    dtypes = {part: parts[part].dtype for _, parts in read_shards(files) for part in parts if "exp_avg_scales" in parts}
    assert dtypes == {
        "exp_avg": torch.uint8,
        "exp_avg_scales": FP32,
        "exp_avg_sq": torch.uint8,
        "exp_avg_sq_scales": FP32,
        "master": FP32,
    }
    second.load_state(read_shards(files), step=2)
    assert_same(run(second, range(2, 4), count), run(first, range(2, 4), count))
    for (name, found), (_, wanted) in zip(saved(second), saved(first), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[part], wanted[part]) for part in found), name


def test_moments_of_the_other_kind_are_not_taken_for_these(make):
    engine, plain = make("bf16")
    run(plain, range(1), 2)
    with pytest.raises(ValueError, match=r"exp_avg_scales of .* is not there"):
        engine.load_state(plain.state(), step=1)


@pytest.mark.parametrize("shape", ["bf16", "bf16 in rounds"])
def test_states_take_on_the_host_what_the_plan_says_half_of_what_others_take(make, shape):
    engine, _ = make(shape)
    run(engine, range(1), count_of(engine))
    engine.drain()
    host = engine._weights.host
    slabs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for own in host.items.values() for t in own}
    planned = cpu_parts(engine.plan, engine.chain)
    assert planned.total_bytes <= sum(slabs.values()) <= planned.total_bytes + mmap.PAGESIZE * len(slabs)
    rounded = [t for t in engine.chain.tensors() if t.optimizer.rounds and t.elements >= 1024]
    elements = sum(t.elements for t in rounded)
    assert rounded and sum(t.state_bytes for t in rounded) == elements * (4 + 2 + 2 * 4 / 256)


@pytest.mark.parametrize("shape", ["fp32", "bf16 in rounds", "resident"])
def test_the_device_never_holds_more_than_planned(make, shape):
    engine, _ = make(shape, metered=True)
    for step in range(2):
        (*_,) = run(engine, range(step, step + 1), count_of(engine))
        assert engine._machine.peak_bytes() <= engine.plan.gpu_budget_bytes

"""Optimizer states on disk, updated piece by piece: plain PyTorch's numbers, and no copy on the host."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from planner.errors import UserError
from planner.schedule.compile import Queue, compile_program
from planner.schedule.items import Item
from planner.schedule.memory_use import cpu_parts, gpu_peak_bytes
from planner.schedule.verify import verify
from tests.support.engine_plans import adamw, mixed_plan
from tests.support.engines import CPU, PAIRS, assert_same, assert_same_state, chain_for, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine
from worker.storage.states import StatesOnDisk
from worker.training.stored import stored_tensors

torch.set_num_threads(1)
PIECE = 1024
COUNT = 2  # micro-batches of a step
SHAPES = {
    "bf16, rounds, clipped": (torch.bfloat16, {"rounds": 2, "slices": 1}, 0.5),
    "bf16, clipped": (torch.bfloat16, {"slices": 2}, 0.5),
    "bf16, no norm": (torch.bfloat16, {"slices": 2}, None),
    "bf16, fetched again": (torch.bfloat16, {"slices": 2}, None),
    "fp32, no norm": (torch.float32, {"slices": 2}, None),
}


def on_disk(chain):
    """The chain with all states on disk that may be."""
    blocks = [
        replace(b, tensors=tuple(replace(t, states_on_disk=t.trainable) for t in b.tensors)) for b in chain.blocks
    ]
    return replace(chain, blocks=tuple(blocks), piece_elements=PIECE)


def fetched_again(plan):
    """The plan with a weight that the CPU updates on the device when a step begins: it is fetched again thereafter."""
    name = "model.layers.1.self_attn.v_proj.weight"
    w, stages = Item.weight(name), {f"{stage.direction}{stage.block}": stage for stage in plan.stages}

    def edit(line, **lists):
        stages[line] = replace(stages[line], **lists)

    edit("F0", cpu_update=tuple(each for each in stages["F0"].cpu_update if each != name))
    edit("F1", prefetch=tuple(item for item in stages["F1"].prefetch if item != w))
    edit("B2", cpu_update=(*stages["B2"].cpu_update, name))
    edit("B1", prefetch=(*stages["B1"].prefetch, w))
    return replace(plan, stages=tuple(stages.values()), resident=(*plan.resident, w))


@pytest.fixture
def make(tmp_path):
    engines = []

    def build(shape, *, found=None, homes=2):
        dtype, slices, clip = SHAPES[shape]
        model = make_model("llama", dtype)
        chain = on_disk(chain_for("llama", dtype))
        plan = mixed_plan(chain, clip=clip is not None, **slices)
        plan = fetched_again(plan) if shape == "bf16, fetched again" else plan
        program = compile_program(plan, chain)
        verify(program, chain, gpu_budget_bytes=gpu_peak_bytes(program, chain))
        store = StatesOnDisk(
            [tmp_path], stored_tensors(plan, chain, model), piece_elements=PIECE, homes=homes, record=found
        )
        engine = Engine(
            model, plan=plan, chain=chain, device=CPU, optimizer=adamw(model), max_grad_norm=clip, states=store
        )
        engine.plan, engine.chain, engine.store, engine.program = plan, chain, store, program
        engine._rounds.codes = PAIRS
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
        engine.store.close()


def plain(shape):
    dtype, _, clip = SHAPES[shape]
    model = make_model("llama", dtype)
    return PlainEngine(model, optimizer=adamw(model), max_grad_norm=clip)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_and_what_is_restored_are_plain_pytorchs(shape, make):
    engine, same = make(shape), plain(shape)
    written = sum(op.bytes for op in engine.program.queue(Queue.DISK_WRITE))
    assert len(engine.program.queue(Queue.DISK_WRITE)) > len(engine.plan.cpu_updated()) > 8  # several pieces of some
    assert_same(run(engine, range(1), COUNT), run(same, range(1), COUNT))
    engine.drain()
    before = engine.store.written_bytes, engine.store.read_bytes
    assert_same(run(engine, range(1, 4), COUNT), run(same, range(1, 4), COUNT))
    engine.drain()
    assert (engine.store.written_bytes - before[0], engine.store.read_bytes - before[1]) == (3 * written, 3 * written)
    assert_same_state(engine, same)
    assert not [item for item in engine._weights.host.items if item[2:] in engine.plan.cpu_updated() and item[0] == "s"]
    weights = dict(same.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in engine.restore().named_parameters())


@pytest.mark.parametrize("shape", ["bf16, rounds, clipped", "bf16, fetched again", "fp32, no norm"])
def test_an_engine_goes_on_from_what_a_checkpoint_names_and_from_one_that_is_a_copy(shape, make, tmp_path):
    first, same = make(shape), plain(shape)
    run(first, range(2), COUNT)
    run(same, range(2), COUNT)
    beside = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in first.state_to_save()]
    masters = {name: parts["master"].clone() for name, parts in first.masters()}
    whole = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in first.state()]
    dtype = SHAPES[shape][0]
    assert all(torch.equal(masters[name].to(dtype), parts["master"].to(dtype)) for name, parts in whole)
    record = first.store.flush()
    first.store.published()
    run(first, range(2, 3), COUNT)  # goes on: what the record names stays
    first.drain()
    first.store.close()
    resumed = make(shape, found=record)
    assert resumed.store.resumed
    resumed.load_state(beside, step=2)
    copied = make(shape, homes=1)
    copied.load_state(whole, step=2)
    expected = run(same, range(2, 4), COUNT)
    for engine in (resumed, copied):
        assert_same(run(engine, range(2, 4), COUNT), expected)
        engine.drain()
        assert_same_state(engine, same)


def test_the_host_has_what_the_plan_says_the_ring_and_no_states(make):
    engine = make("bf16, clipped")
    batches, rest = data(0, COUNT)
    engine.step(batches, learning_rate=learning_rate(0), **rest)
    engine.drain()
    items, stored = engine._weights.host.items, engine._weights.stored
    slabs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for own in items.values() for t in own}
    parts = cpu_parts(engine.plan, engine.chain)
    assert parts.state_ring_bytes == sum(t.nbytes for t in stored.ring) > 0
    expected = parts.total_bytes - parts.state_ring_bytes
    assert expected <= sum(slabs.values()) <= expected + mmap.PAGESIZE * len(slabs)


def test_an_error_before_the_updates_takes_the_step_back_and_one_of_the_disk_tears_it(make, monkeypatch):
    shape = "bf16, clipped"
    engine, same = make(shape), plain(shape)
    run(engine, range(1), COUNT)
    batches, rest = data(1, COUNT)
    with pytest.raises(RuntimeError, match="in the model"):
        handle = engine._model.lm_head.register_forward_pre_hook(_fails)
        try:
            engine.step(batches, learning_rate=learning_rate(1), **rest)
        finally:
            handle.remove()
    run(same, range(1), COUNT)
    assert_same(run(engine, range(1, 2), COUNT), run(same, range(1, 2), COUNT))
    engine.drain()
    assert_same_state(engine, same)

    def failing(*args):
        raise UserError("The disk is gone.", code="disk-failed")

    monkeypatch.setattr(engine.store, "write", failing)
    with pytest.raises(UserError, match="The disk is gone"):
        run(engine, range(2, 4), COUNT)
        engine.drain()
    assert engine.torn


def _fails(*args):
    raise RuntimeError("in the model")


def test_a_store_of_other_states_than_the_plans_is_refused(make, tmp_path):
    engine = make("bf16, clipped")
    model = make_model("llama", torch.bfloat16)
    with pytest.raises(ValueError, match="not those of the store"):
        Engine(model, plan=engine.plan, chain=engine.chain, device=CPU, optimizer=adamw(model), max_grad_norm=0.5)

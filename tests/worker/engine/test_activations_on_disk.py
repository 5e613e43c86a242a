"""Activations on disk between forward and backward: plain PyTorch's numbers, and no copy on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.errors import UserError
from planner.schedule.compile import Queue, compile_program
from planner.schedule.memory_use import cpu_parts, gpu_peak_bytes
from planner.schedule.operations import ACTIVATION_SLOTS
from planner.schedule.verify import verify
from planner.search.activations_on_disk import with_twins
from tests.support.chaos_engine import ChaosInterpreter, Mood
from tests.support.engine_plans import adamw, mixed_plan, resident_plan
from tests.support.engines import CPU, PAIRS, assert_same, assert_same_state, chain_for, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from worker.engine.engine import Engine
from worker.runtime.cpu import CpuMachine
from worker.storage.activations import ActivationsOnDisk
from worker.training.stored import passing_sizes

torch.set_num_threads(1)
FORMS = {
    "mixed, 2 slices": (mixed_plan, {"slices": 2}, None),
    "mixed, 4 slices, clipped": (mixed_plan, {"slices": 4}, 0.5),
    "mixed, 2 rounds of 2, clipped": (mixed_plan, {"slices": 2, "rounds": 2}, 0.5),
    "resident, 1 slice": (resident_plan, {"slices": 1}, None),
    "resident, 2 rounds of 1": (resident_plan, {"slices": 1, "rounds": 2}, 0.5),
}


@pytest.fixture
def make(tmp_path):
    engines = []

    def build(form, *, model="llama", dtype=torch.float32, first=0, keeps=True, metered=False):
        plan_of, shape, clip = FORMS[form]
        its = make_model(model, dtype)
        chain = with_twins(chain_for(model, dtype))
        plan = plan_of(chain, clip=clip is not None, **shape)
        names = [option.name for option in chain.blocks[1].options if option.on_disk]
        layers = [names[(first + k) % len(names)] for k in range(len(plan.options) - 2)]
        plan = replace(plan, options=(plan.options[0], *layers, plan.options[-1]), gpu_budget_bytes=0)
        program = compile_program(plan, chain)
        verify(program, chain)
        sizes = passing_sizes(plan, chain)
        scratch = ActivationsOnDisk([tmp_path / "drive"], sizes) if keeps else None
        engine = Engine(
            its,
            plan=plan,
            chain=chain,
            device=CPU,
            optimizer=adamw(its),
            max_grad_norm=clip,
            scratch=scratch,
            metered=metered,
        )
        engine.plan, engine.chain, engine.scratch, engine.program = plan, chain, scratch, program
        engine.count = plan.slices * plan.rounds
        engine._rounds.codes = PAIRS
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
        if engine.scratch is not None:
            engine.scratch.close()
    assert not (tmp_path / "drive").exists()


def plain(form, model="llama", dtype=torch.float32):
    its = make_model(model, dtype)
    return PlainEngine(its, optimizer=adamw(its), max_grad_norm=FORMS[form][2])


@pytest.mark.parametrize("form", FORMS)
def test_steps_are_plain_pytorchs_and_the_drive_moves_what_the_program_says(form, make):
    engine, same = make(form), plain(form)
    writes, reads = engine.program.queue(Queue.DISK_WRITE), engine.program.queue(Queue.DISK_READ)
    assert_same(run(engine, range(3), engine.count), run(same, range(3), engine.count))
    engine.drain()
    assert_same_state(engine, same)
    assert len(writes) == len(reads)
    scratch, planned = engine.scratch, 3 * sum(op.bytes for op in writes)
    assert scratch.read_bytes == scratch.written_bytes
    assert planned <= scratch.written_bytes <= planned + 3 * 4096 * len(writes)  # tensors begin at multiples of 64


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("model", "dtype"), [("gpt2", torch.float32), ("llama", torch.bfloat16)], ids=["gpt2", "bf16"])
def test_every_option_of_a_layer_may_have_its_activations_on_disk(model, dtype, make):
    form = "mixed, 4 slices, clipped"
    same = plain(form, model, dtype)
    expected = run(same, range(2), 4)
    count = sum(option.on_disk for option in with_twins(chain_for(model, dtype)).blocks[1].options)
    assert count >= 5
    for first in range(0, count, 3):
        engine = make(form, model=model, dtype=dtype, first=first)
        assert len(engine.program.queue(Queue.DISK_WRITE)) == 12
        assert_same(run(engine, range(2), 4), expected)
        engine.close()
        engine.scratch.close()


def test_the_host_has_the_ring_and_nothing_else_of_them_and_the_device_what_is_predicted(make):
    form = "mixed, 4 slices, clipped"
    engine = make(form, metered=True)
    batches, rest = data(0, 4)
    found = engine.step(batches, learning_rate=learning_rate(0), **rest)
    assert found.peak_bytes <= gpu_peak_bytes(engine.program, engine.chain)
    host, parts = engine._weights.host, cpu_parts(engine.plan, engine.chain)
    assert host._parked == {} and parts.offloaded_bytes == 0
    ring = host.stored._ring
    assert len(ring) == ACTIVATION_SLOTS and sum(t.nbytes for t in ring) == parts.activation_ring_bytes
    slots = {t.untyped_storage().data_ptr() for t in ring}
    items = [t for item, own in host.items.items() if item[0] == "a" for t in own]
    assert items and {t.untyped_storage().data_ptr() for t in items} <= slots


@pytest.mark.parametrize("seed", range(4))
def test_any_order_that_queues_and_waits_allow_computes_the_same(seed, make, monkeypatch):
    form = "mixed, 2 rounds of 2, clipped"
    monkeypatch.setattr(
        CpuMachine,
        "interpreter",
        lambda self, program, performer: ChaosInterpreter(program, performer, Mood.drawn(seed)),
    )
    assert_same(run(make(form), range(3), 4), run(plain(form), range(3), 4))


def test_shorter_slices_move_less_and_an_evaluation_moves_nothing(make):
    form = "mixed, 4 slices, clipped"
    engine, same = make(form), plain(form)
    long, rest = data(0, 4)
    assert_same([_step(engine, 0, long, rest)], [_step(same, 0, long, rest)])
    full = engine.scratch.written_bytes
    short, rest = data(1, 4, length=8)
    assert_same([_step(engine, 1, short, rest)], [_step(same, 1, short, rest)])
    engine.drain()
    assert 0 < engine.scratch.written_bytes - full < 0.8 * full
    moved = engine.scratch.written_bytes
    losses = engine.evaluate(long[:2]).losses
    assert all(torch.equal(a, b) for a, b in zip(losses, same.evaluate(long[:2]).losses, strict=True))
    assert engine.scratch.written_bytes == moved
    assert_same_state(engine, same)


def _step(engine, step, batches, rest):
    result = engine.step(batches, learning_rate=learning_rate(step), **rest)
    return [loss.clone() for loss in result.losses], result.grad_norm


def test_after_an_error_in_the_model_the_step_is_taken_back_and_one_of_the_disk_ends_it(make, monkeypatch):
    form = "mixed, 4 slices, clipped"
    engine, same = make(form), plain(form)
    assert_same(run(engine, range(1), 4), run(same, range(1), 4))
    batches, rest = data(1, 4)
    handle = engine._model.lm_head.register_forward_pre_hook(_fails)
    with pytest.raises(RuntimeError, match="in the model"):
        engine.step(batches, learning_rate=learning_rate(1), **rest)
    handle.remove()
    assert_same(run(engine, range(1, 2), 4), run(same, range(1, 2), 4))
    engine.drain()
    kept = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in engine.state()]
    for which in ("write", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scratch, which, _is_gone)
            with pytest.raises(UserError, match="The disk is gone"):
                engine.step(batches, learning_rate=learning_rate(1), **rest)
        assert engine.torn
        engine.load_state(kept, step=2)
    assert_same(run(engine, range(2, 3), 4), run(same, range(2, 3), 4))
    engine.drain()
    assert_same_state(engine, same)


def _fails(*args):
    raise RuntimeError("in the model")


def _is_gone(*args):
    raise UserError("The disk is gone.", code="disk-failed")


def test_without_anything_that_keeps_them_no_step_begins(make):
    engine = make("mixed, 2 slices", keeps=False)
    batches, rest = data(0, 2)
    with pytest.raises(ValueError, match="nothing was given that keeps them"):
        engine.step(batches, learning_rate=learning_rate(0), **rest)

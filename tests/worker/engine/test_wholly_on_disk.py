"""Weights that are trained and wholly on disk: plain PyTorch's numbers, and nothing of them in the host's memory."""

from __future__ import annotations

import mmap
import time
from dataclasses import replace

import pytest
import torch

from planner.errors import UserError
from planner.schedule.compile import Queue, compile_program
from planner.schedule.memory_use import cpu_parts, gpu_peak_bytes
from planner.schedule.operations import GRADIENT_SLOTS, SLOTS
from planner.schedule.verify import InvalidProgram, verify
from tests.support.chaos_engine import ChaosInterpreter, Mood
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.engines import CPU, PAIRS, assert_same, assert_same_state, chain_for, data, learning_rate, run
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import make_model
from tests.worker.engine.test_errors import Injected, fail_at, late_plan
from tests.worker.engine.test_left_out import choosing
from tests.worker.engine.test_states_on_disk import fetched_again
from worker.engine.block_calls import Call
from worker.engine.engine import Engine
from worker.runtime.cpu import CpuMachine
from worker.storage.activations import ActivationsOnDisk
from worker.storage.states import StatesOnDisk
from worker.training.stored import passing_sizes, stored_tensors

torch.set_num_threads(1)
PIECE = 1024
COUNT = 2  # micro-batches of a step
SHAPES = {
    "slices, clipped": ({"slices": 2}, 0.5),
    "slices": ({"slices": 2}, None),
    "slices, fetched again": ({"slices": 2}, None),
    "rounds, clipped": ({"rounds": 2, "slices": 1}, 0.5),
    "rounds": ({"rounds": 2, "slices": 1}, None),
    "late": ({"slices": 2}, None),
    "choosing": ({"slices": 2}, None),
}


def model_of(shape):
    """ "choosing": no gradient reaches some of its weights."""
    return choosing(torch.bfloat16) if shape == "choosing" else make_model("llama", torch.bfloat16)


def wholly_on_disk(chain, plan, layers=None):
    """The chain with all weights of these layers, or of all, that the CPU updates wholly on disk, and all states."""

    def moved(tensor, layer):
        return replace(tensor, states_on_disk=tensor.trainable, on_disk=layer and tensor.name in plan.cpu_updated())

    layers = range(1, len(chain.blocks) - 1) if layers is None else layers
    blocks = [replace(b, tensors=tuple(moved(t, i in layers) for t in b.tensors)) for i, b in enumerate(chain.blocks)]
    return replace(chain, blocks=tuple(blocks), piece_elements=PIECE)


def planned(shape):
    """A plan, and its chain. "late": the updates of two layers are left to the next step, which reads the weights of
    the first between them; only that one is wholly on disk, of the other the states are."""
    sizes, clip = SHAPES[shape]
    chain = chain_of(model_of(shape)) if shape == "choosing" else chain_for("llama", torch.bfloat16)
    if shape == "late":
        plan = late_plan(chain, clip=False, **sizes)
        return plan, wholly_on_disk(chain, plan, layers=[2])
    plan = mixed_plan(chain, clip=clip is not None, **sizes)
    chain = wholly_on_disk(chain, plan)
    return fetched_again(plan) if shape == "slices, fetched again" else plan, chain


@pytest.fixture
def make(tmp_path):
    engines = []

    def build(shape, *, found=None, homes=2):
        model, clip = model_of(shape), SHAPES[shape][1]
        plan, chain = planned(shape)
        program = compile_program(plan, chain)
        verify(program, chain, gpu_budget_bytes=gpu_peak_bytes(program, chain))
        store = StatesOnDisk(
            [tmp_path], stored_tensors(plan, chain, model), piece_elements=PIECE, homes=homes, record=found
        )
        scratch = ActivationsOnDisk([tmp_path / "scratch"], passing_sizes(plan, chain))
        engine = Engine(
            model,
            plan=plan,
            chain=chain,
            device=CPU,
            optimizer=adamw(model),
            max_grad_norm=clip,
            states=store,
            scratch=scratch,
        )
        engine.plan, engine.chain, engine.store, engine.program, engine.scratch = plan, chain, store, program, scratch
        engine._rounds.codes = {} if shape == "choosing" else PAIRS
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()
        engine.store.close()
        engine.scratch.close()


def plain(shape):
    model = model_of(shape)
    return PlainEngine(model, optimizer=adamw(model), max_grad_norm=SHAPES[shape][1])


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "late"])
def test_steps_and_what_is_restored_are_plain_pytorchs(shape, make):
    engine, same = make(shape), plain(shape)
    assert sum(t.wholly_on_disk for t in engine.chain.tensors()) > 8
    writes, reads = engine.program.queue(Queue.DISK_WRITE), engine.program.queue(Queue.DISK_READ)
    assert {op.subject[0] for op in writes} == set("gsw") == {op.subject[0] for op in reads}
    assert_same(run(engine, range(4), COUNT), run(same, range(4), COUNT))
    engine.drain()
    assert_same_state(engine, same)
    weights = dict(same.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in engine.restore().named_parameters())


@pytest.mark.parametrize("shape", ["slices, clipped", "rounds", "slices, fetched again", "choosing"])
def test_an_engine_goes_on_from_what_a_checkpoint_names_and_from_one_that_is_a_copy(shape, make):
    first, same = make(shape), plain(shape)
    run(first, range(2), COUNT)
    run(same, range(2), COUNT)
    beside = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in first.state_to_save()]
    masters = {name: parts["master"].clone() for name, parts in first.masters()}
    whole = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in first.state()]
    assert all(torch.equal(masters[name].bfloat16(), parts["master"].bfloat16()) for name, parts in whole)
    record = first.store.flush()
    first.store.published()
    run(first, range(2, 3), COUNT)  # goes on: what the record names stays
    if shape == "choosing":  # of what is wholly on disk nothing else is beside it
        there = {t.name for t in first.chain.tensors() if t.wholly_on_disk}
        assert {tuple(parts) for name, parts in beside if name in there} == {("left_out",)}
    first.drain()
    first.store.close()
    first.scratch.close()
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


def test_the_host_has_their_rings_and_nothing_else_of_them(make):
    engine = make("slices, clipped")
    run(engine, range(1), COUNT)
    engine.drain()
    host, parts = engine._weights.host, cpu_parts(engine.plan, engine.chain)
    there = {t.name for t in engine.chain.tensors() if t.wholly_on_disk}
    assert all(t.device.type == "meta" for item, own in host.items.items() if item[2:] in there for t in own)
    rings = [*host._slots, *host.weights._ring]
    in_rings = [t.untyped_storage().data_ptr() for t in rings]
    masters = ((name, parts["master"]) for name, parts in engine.masters() if name in there)
    assert all(master.untyped_storage().data_ptr() in in_rings for _, master in masters)  # no copy of them is made
    assert len(rings) == SLOTS + GRADIENT_SLOTS and sum(t.nbytes for t in rings) == parts.ring_bytes > 0
    slabs = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for own in host.items.values()
        for t in own
        if t.device.type != "meta"
    }
    expected = parts.total_bytes - parts.ring_bytes - parts.state_ring_bytes
    assert expected <= sum(slabs.values()) <= expected + mmap.PAGESIZE * len(slabs)
    assert parts.gradients_bytes == 0 and parts.ring_bytes > 0


@pytest.mark.sweep(4)
@pytest.mark.parametrize("seed", range(4))
def test_any_order_that_queues_and_waits_allow_computes_the_same(seed, make, monkeypatch):
    shape = ("slices, clipped", "rounds")[seed % 2]
    monkeypatch.setattr(
        CpuMachine,
        "interpreter",
        lambda self, program, performer: ChaosInterpreter(program, performer, Mood.drawn(seed)),
    )
    assert_same(run(make(shape), range(3), COUNT), run(plain(shape), range(3), COUNT))


@pytest.mark.parametrize("shape", ["slices, clipped", "rounds"])
def test_any_wait_of_theirs_that_is_left_out_is_rejected(shape, make):
    engine = make(shape)
    program, chain = engine.program, engine.chain
    there = {t.name for t in chain.tensors() if t.wholly_on_disk}
    theirs = [
        (number, wait)
        for number, op in enumerate(program.ops)
        if there & {op.subject[2:], *op.names}
        for wait in op.waits
    ]
    assert len(theirs) > 100
    for number, wait in theirs[::4]:
        op = program.ops[number]
        without = replace(op, waits=tuple(other for other in op.waits if other != wait))
        with pytest.raises(InvalidProgram):
            verify(replace(program, ops=(*program.ops[:number], without, *program.ops[number + 1 :])), chain)


def test_an_evaluation_reads_them_and_an_error_takes_the_step_back_or_ends_it(make, monkeypatch):
    shape = "slices, clipped"
    engine, same = make(shape), plain(shape)
    assert_same(run(engine, range(1), COUNT), run(same, range(1), COUNT))
    batches, rest = data(1, COUNT)
    losses = engine.evaluate(batches).losses
    assert all(torch.equal(a, b) for a, b in zip(losses, same.evaluate(batches).losses, strict=True))
    handle = engine._model.lm_head.register_forward_pre_hook(_fails)
    with pytest.raises(RuntimeError, match="in the model"):
        engine.step(batches, learning_rate=learning_rate(1), **rest)
    handle.remove()
    assert_same(run(engine, range(1, 2), COUNT), run(same, range(1, 2), COUNT))
    engine.drain()
    kept = [(name, {key: t.clone() for key, t in parts.items()}) for name, parts in engine.state()]
    for which in ("write", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.scratch, which, _is_gone)
            with pytest.raises(UserError, match="The disk is gone"):
                engine.step(batches, learning_rate=learning_rate(1), **rest)
                engine.drain()
        assert engine.torn
        engine.load_state(kept, step=2)
    assert_same(run(engine, range(2, 3), COUNT), run(same, range(2, 3), COUNT))


@pytest.mark.parametrize("failing", [None, 0], ids=["drained", "in an error"])
def test_what_a_step_leaves_to_the_next_is_in_order_without_it_though_the_drive_writes_slowly(
    failing, make, monkeypatch
):
    """The states of one layer are read into slots out of which those of the other are still written. `failing`: the
    block at which the next step ends in an error; without one there is a drain."""
    engine, same = make("late"), plain("late")
    assert {op.stage for op in engine.program.ops if op.carried} == {"F0", "F1"}
    at_once = engine.store.write
    monkeypatch.setattr(engine.store, "write", lambda *piece: (time.sleep(0.002), at_once(*piece)))
    for step in range(2):
        assert_same(run(engine, range(step, step + 1), COUNT), run(same, range(step, step + 1), COUNT))
        if failing is None:
            engine.drain()
            continue
        with monkeypatch.context() as patch:
            fail_at(patch, Call, "forward", lambda self, *rest: self.block.index == failing)
            with pytest.raises(Injected):
                run(engine, range(step + 1, step + 2), COUNT)
        assert not engine.torn
    assert_same_state(engine, same)


def _fails(*args):
    raise RuntimeError("in the model")


def _is_gone(*args):
    raise UserError("The disk is gone.", code="disk-failed")

"""Errors inside a step: raised once, nothing left behind, and the engine goes on after a load."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from planner.errors import UserError
from planner.optimizers import adamw as adamw_module
from planner.schedule.items import Item
from tests.support.engine_plans import adamw, chain_of, make_plan, resident_plan
from tests.support.engines import CPU, assert_same, assert_same_state, build, data, own_threads, run
from tests.support.tiny_models import batch_of, make_model
from worker.engine import forward_only
from worker.engine.block_calls import Call
from worker.engine.device_items import Device
from worker.engine.engine import Engine
from worker.engine.gradients import Gradients

torch.set_num_threads(1)


class Injected(Exception):
    pass


def fail_at(monkeypatch, owner, method, matches, error=Injected):
    """Let `method` raise where `matches(*args)`."""
    original = getattr(owner, method)

    def wrapped(*args, **kwargs):
        if matches(*args):
            raise error("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapped)


def fail_at_item(monkeypatch, method, matches, error=Injected):
    """Let the device's `method` raise where `matches(item)`, when it has done what it was given before."""
    original = getattr(Device, method)

    def wrapped(self, *items):
        for item in items:
            if matches(item):
                raise error("injected")
            original(self, item)

    monkeypatch.setattr(Device, method, wrapped)


def in_layer(index, k):
    """Fails in forward, in the third call of a layer by the slices of a step."""

    def inject(monkeypatch, engine):
        calls = iter(range(100))
        layer = engine._model.get_submodule(engine.chain.blocks[index].name)

        def hook(module, args):
            if next(calls) == k:
                raise Injected("injected")

        layer.register_forward_pre_hook(hook)

    return inject


FAILURES = {
    "h2d queue": lambda m, e: fail_at_item(m, "fetch", lambda item: item.startswith("w:model.layers.1")),
    "d2h queue": lambda m, e: fail_at_item(m, "send", lambda item: item.startswith("g:model.layers.0")),
    "activations": lambda m, e: fail_at_item(m, "send", lambda item: item == "a:3.1"),
    "cpu queue": lambda m, e: fail_at(m, adamw_module, "update", lambda targets, *rest: "layers.0" in targets[0].name),
    "device update": lambda m, e: fail_at(
        m, adamw_module, "update", lambda targets, *rest: "lm_head" in targets[0].name
    ),
    "allocation": lambda m, e: fail_at_item(m, "allocate", lambda item: item == "a:3.1"),
    "backward": lambda m, e: fail_at(
        m, Gradients, "add", lambda self, name, k, *rest: (k, name) == (2, "model.layers.0.mlp.up_proj.weight")
    ),
    "head": lambda m, e: fail_at(m, Gradients, "add", lambda self, name, k, *rest: (k, name) == (2, "lm_head.weight")),
    "out of memory": lambda m, e: fail_at_item(
        m, "allocate", lambda item: item == "w:model.layers.2.mlp.up_proj.weight", error=torch.OutOfMemoryError
    ),
    "block": lambda m, e: fail_at(m, Call, "forward", lambda self, *rest: (self.block.index, self.k) == (3, 1)),
    "slice": in_layer(2, 2),
    "first slice": in_layer(1, 0),
}


BEFORE_UPDATES = ("head", "slice", "first slice", "out of memory", "block")
"""Failures at which no update of the step has begun: a forward has none, nor has a head without all of its slices."""


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_anywhere_is_raised_once_ends_the_threads_and_frees_the_device(make, monkeypatch, where):
    engine, plain = make("llama", slices=3, metered=True)
    run(engine, range(2), 3)
    saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state()]
    at_rest = engine._machine.meter.now
    with monkeypatch.context() as patch:
        FAILURES[where](patch, engine)
        with pytest.raises((Injected, torch.OutOfMemoryError)):
            run(engine, range(2, 3), 3)
            engine.drain()
    if where not in BEFORE_UPDATES:
        assert own_threads() == []
        with pytest.raises(UserError, match="load a checkpoint") as caught:
            run(engine, range(2, 3), 3)
        assert caught.value.code == "weights-torn"
        engine.load_state(saved, step=2)
    gc.collect()  # the traceback's frames refer to each other
    assert engine._machine.meter.now == at_rest
    run(plain, range(2), 3)
    assert_same(run(engine, range(2, 4), 3), run(plain, range(2, 4), 3))
    assert_same_state(engine, plain)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["alone", "clipped"])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("call", range(1, 14))
def test_a_step_that_fails_before_its_updates_leaves_the_weights_as_they_were(
    make, monkeypatch, dtype, clip, rounds, call
):
    """Whichever call of a block fails: with updates of the step before under way, gradients that have overwritten
    working copies, and a round behind it. Nothing is drained before the step that fails."""
    engine, plain = make("llama", dtype=dtype, slices=2, rounds=rounds, clip=clip)
    count = 2 * rounds
    run(engine, range(2), count)
    run(plain, range(2), count)
    calls = iter(range(1, 100))
    name = "backward" if call > 10 else "forward"

    original = getattr(Call, name)

    def fails(self, *args):
        if next(calls) == (call - 10 if name == "backward" else call):
            raise Injected("injected")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Call, name, fails)
        with pytest.raises(Injected):
            run(engine, range(2, 3), count)
    if call > 12 and clip is None and rounds == 1:  # the head is updated once its last slice is done
        assert engine.torn
        return
    assert not engine.torn
    assert_same(run(engine, range(2, 4), count), run(plain, range(2, 4), count))
    assert_same_state(engine, plain)


def late_plan(chain, *, slices, clip):
    """All layers stream and are updated on the CPU: the second one's update runs beside the next step's first block,
    the third one's beside its second."""
    w, g = ({i: [Item.of(c, t.name) for t in b.tensors] for i, b in enumerate(chain.blocks)} for c in "wg")
    names = {i: [t.name for t in b.tensors] for i, b in enumerate(chain.blocks)}
    lines = {
        "F0": {"prefetch": w[1], "cpu_update": names[2]},
        "F1": {"prefetch": w[2], "evict": w[1], "cpu_update": names[3]},
        "F2": {"prefetch": w[3], "evict": w[2]},
        "H4": {"gpu_update": names[4], "evict": g[4]},
        "B3": {"prefetch": w[2], "offload": g[3], "evict": w[3]},
        "B2": {"prefetch": w[1], "offload": g[2], "evict": [*w[2], *g[3]]},
        "B1": {"offload": g[1], "evict": [*w[1], *g[2]]},
        "B0": {"evict": [*g[1], *g[0]], "gpu_update": names[0], "cpu_update": names[1]},
    }
    kept = [Item.of(c, n) for n in (*names[0], *names[4]) for c in "ws"]
    return make_plan(chain, lines, options=("keep",) * 5, resident=kept, slices=slices, rounds=1, clip=clip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("call", range(4))
def test_updates_that_a_failed_step_has_not_come_to_are_done(make, monkeypatch, dtype, call):
    engine, plain = make("llama", late_plan, dtype=dtype, slices=1)
    assert {op.stage for op in engine._program.ops if op.carried} == {"F0", "F1"}
    run(engine, range(2), 1)
    run(plain, range(2), 1)
    with monkeypatch.context() as patch:
        fail_at(patch, Call, "forward", lambda self, *rest: self.block.index == call)
        with pytest.raises(Injected):
            run(engine, range(2, 3), 1)
    assert_same(run(engine, range(2, 4), 1), run(plain, range(2, 4), 1))
    assert_same_state(engine, plain)


@pytest.mark.parametrize("seen", ["flush", "wait"])
def test_updates_of_the_step_before_are_done_though_a_queue_has_failed(make, monkeypatch, seen):
    """The copy of a layer fails before the updates that the step before left have begun; `seen`: where that is met."""
    engine, plain = make("llama", late_plan, slices=1)
    run(engine, range(2), 1)
    run(plain, range(2), 1)
    failed = threading.Event()

    def after_the_failure(owner, method):
        original = getattr(owner, method)
        patch.setattr(owner, method, lambda *rest: (failed.wait(10), original(*rest))[1])

    with monkeypatch.context() as patch:
        fail_at_item(patch, "fetch", lambda item: item.startswith("w:model.layers.0") and not failed.set())
        after_the_failure(adamw_module, "update")
        at_first = engine._interpreter.flush
        calls = iter(range(100))
        if seen == "flush":  # the first hands the operations over
            patch.setattr(engine._interpreter, "flush", lambda: (next(calls) and failed.wait(10), at_first())[1])
        else:
            after_the_failure(engine._interpreter, "wait")
        with pytest.raises(Injected):
            run(engine, range(2, 3), 1)
    assert engine.torn and failed.is_set()
    before = dict(plain.model.named_parameters())
    assert [n for n, p in engine.restore().named_parameters() if not torch.equal(p, before[n])] == []


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("where", FAILURES)
def test_weights_come_back_after_an_error_each_as_before_the_step_or_as_after(make, monkeypatch, where, dtype):
    engine, plain = make("llama", dtype=dtype, slices=3)
    run(engine, range(2), 3)
    run(plain, range(2), 3)
    with monkeypatch.context() as patch:
        FAILURES[where](patch, engine)
        with pytest.raises((Injected, torch.OutOfMemoryError)):
            run(engine, range(2, 3), 3)
            engine.drain()
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    run(plain, range(2, 3), 3)
    after = dict(plain.model.named_parameters())
    got = dict(engine.restore().named_parameters())
    assert own_threads() == []
    assert [n for n in got if not (torch.equal(got[n], before[n]) or torch.equal(got[n], after[n]))] == []
    if where in BEFORE_UPDATES:
        assert [n for n in got if not torch.equal(got[n], before[n])] == []


def test_an_error_on_a_queue_names_the_operation(make, monkeypatch):
    engine, _ = make("llama")
    FAILURES["h2d queue"](monkeypatch, engine)
    with pytest.raises(Injected) as caught:
        run(engine, range(1), 1)
    assert any("fetch@F1:w:model.layers.1" in note and "h2d" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("slices", [1, 3])
def test_a_skipped_block_is_an_error_that_says_so(make, slices):
    engine, _ = make("llama", slices=slices)
    del engine._model.model.layers[1]
    with pytest.raises(RuntimeError, match=r"slice 0 arrived at block 3, the program expects F2\.0 \(after F1\.\d\)"):
        run(engine, range(1), slices)
    assert not engine.torn


@pytest.mark.parametrize("slices", [1, 3])
def test_a_forward_that_ends_early_is_an_error(make, slices):
    engine, _ = make("llama", slices=slices)
    engine._model.model.layers = engine._model.model.layers[:1]
    engine._model.lm_head = torch.nn.Linear(32, 128)
    with pytest.raises(RuntimeError, match="without a forward of block 4"):
        run(engine, range(1), slices)
    assert not engine.torn


def test_a_wrong_number_of_batches_is_refused_and_harms_nothing(make):
    engine, plain = make("llama", slices=2)
    batches, rest = data(0, 3)
    with pytest.raises(ValueError, match="3 batches"):
        engine.step(batches, learning_rate=1e-3, **rest)
    assert_same(run(engine, range(2), 2), run(plain, range(2), 2))


def test_a_norm_is_given_exactly_when_the_plan_clips():
    model = make_model("llama")
    chain = chain_of(model)
    with pytest.raises(ValueError, match="clip"):
        Engine(model, plan=resident_plan(chain), chain=chain, optimizer=adamw(model), max_grad_norm=1.0, device=CPU)


def test_a_state_of_another_model_is_refused(make):
    engine, _ = make("llama")
    saved = list(engine.state())
    with pytest.raises(ValueError, match="nothing was given for"):
        engine.load_state(saved[1:], step=1)
    with pytest.raises(ValueError, match="comes twice"):
        engine.load_state([*saved, saved[0]], step=1)
    name, parts = saved[0]
    with pytest.raises(ValueError, match="has shape"):
        engine.load_state([(name, {k: t[:1] for k, t in parts.items()}), *saved[1:]], step=1)


def test_a_closed_engine_says_that_it_is_closed(make):
    engine, _ = make("llama")
    engine.close()
    with pytest.raises(UserError, match="engine-closed"):
        run(engine, range(1), 1)


def test_an_interrupt_while_the_slices_are_started_ends_them_all(make, monkeypatch):
    engine, plain = make("llama", slices=3)
    calls = iter([KeyboardInterrupt()])

    def start(iterable, maxlen):
        for number, _ in enumerate(iterable):
            if number == 1 and (error := next(calls, None)):
                raise error

    monkeypatch.setattr("worker.engine.lockstep.deque", start)
    with pytest.raises(KeyboardInterrupt):
        run(engine, range(1), 3)
    assert_same(run(engine, range(2), 3), run(plain, range(2), 3))
    assert_same_state(engine, plain)


def test_an_evaluation_without_room_for_several_batches_goes_on_with_fewer(make, monkeypatch):
    engine, _ = make("llama")
    batches = [batch_of(k) for k in range(5)]
    wanted = [float(loss) for loss in engine.evaluate(batches).losses]
    tried, value = [], forward_only._value

    def full(model, batch, device):
        size = engine._forward_only._lockstep._slices
        tried.append(size)
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return value(model, batch, device)

    monkeypatch.setattr(forward_only, "_value", full)
    for _ in range(2):
        assert [float(loss) for loss in engine.evaluate(batches).losses] == wanted
    assert tried == [5, 2, *[1] * 10]


def leaving_plan(chain, *, slices, clip):
    """All is updated on the device and there between steps, but the first layer's weights leave it in between."""
    w = [Item.weight(t.name) for t in chain.blocks[1].tensors]
    trained = [t.name for t in chain.tensors()]
    lines = {"F1": {"evict": w}, "B2": {"prefetch": w}, "B0": {"gpu_update": trained, "offload": w}}
    lines["B0"]["evict"] = [Item.gradient(name) for name in trained]
    kept = [Item.of(c, name) for name in trained for c in "ws"]
    return make_plan(chain, lines, options=("keep",) * 5, resident=kept, slices=slices, rounds=1, clip=clip)


@pytest.mark.parametrize("number", [1, 3])
def test_what_there_was_room_for_but_no_content_yet_comes_from_the_host_again(monkeypatch, number):
    """A step fails at the second or the fourth of the weights that it brings back: those before it are there, empty."""
    engine, plain = build("llama", leaving_plan, slices=2, clip=0.05)
    try:
        name = [t.name for t in engine.chain.blocks[1].tensors][number]
        run(engine, range(2), 2)
        with monkeypatch.context() as patch:
            left = [f"w:{name}"]  # to come back for the next step there is room
            fail_at_item(
                patch, "allocate", lambda item: item in left and bool(left.pop()), error=torch.OutOfMemoryError
            )
            with pytest.raises(torch.OutOfMemoryError):
                run(engine, range(2, 3), 2)
        assert not engine.torn
        run(plain, range(2), 2)
        assert_same(run(engine, range(2, 4), 2), run(plain, range(2, 4), 2))
        assert_same_state(engine, plain)
    finally:
        engine.close()

"""Errors inside a step: raised once, nothing left behind, and the engine goes on after a load."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.support.engine_plans import adamw, chain_of, resident_plan
from tests.support.engines import CPU, assert_same, assert_same_state, data, own_threads, run
from tests.support.tiny_models import make_model
from worker.engine import adamw as adamw_module
from worker.engine.device_items import Device
from worker.engine.engine import Engine
from worker.engine.gradients import Gradients

torch.set_num_threads(1)


class Injected(Exception):
    pass


def fail_at(monkeypatch, owner, method, matches):
    """Let `method` raise where `matches(*args)`."""
    original = getattr(owner, method)

    def wrapped(*args, **kwargs):
        if matches(*args):
            raise Injected("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapped)


def in_layer(index, k):
    """Fails in forward, in the third call of a layer by the slices of a step."""
    calls = iter(range(100))

    def inject(monkeypatch, engine):
        layer = engine._model.get_submodule(engine.chain.blocks[index].name)

        def hook(module, args):
            if next(calls) == k:
                raise Injected("injected")

        layer.register_forward_pre_hook(hook)

    return inject


FAILURES = {
    "h2d queue": lambda m, e: fail_at(m, Device, "fetch", lambda self, item: item.startswith("w:model.layers.1")),
    "d2h queue": lambda m, e: fail_at(m, Device, "send", lambda self, item: item.startswith("g:model.layers.0")),
    "activations": lambda m, e: fail_at(m, Device, "send", lambda self, item: item == "a:3.1"),
    "cpu queue": lambda m, e: fail_at(m, adamw_module, "update", lambda targets, *rest: "layers.0" in targets[0].name),
    "device update": lambda m, e: fail_at(
        m, adamw_module, "update", lambda targets, *rest: "lm_head" in targets[0].name
    ),
    "allocation": lambda m, e: fail_at(m, Device, "allocate", lambda self, item: item == "a:3.1"),
    "backward": lambda m, e: fail_at(
        m, Gradients, "add", lambda self, name, k, *rest: (k, name) == (2, "model.layers.0.mlp.up_proj.weight")
    ),
    "head": lambda m, e: fail_at(m, Gradients, "add", lambda self, name, k, *rest: (k, name) == (2, "lm_head.weight")),
    "slice": in_layer(2, 2),
    "first slice": in_layer(1, 0),
}


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_anywhere_is_raised_once_ends_the_threads_and_frees_the_device(make, monkeypatch, where):
    engine, plain = make("llama", slices=3, metered=True)
    run(engine, range(2), 3)
    saved = [(name, {k: t.clone() for k, t in parts.items()}) for name, parts in engine.state()]
    at_rest = engine._machine.meter.now
    with monkeypatch.context() as patch:
        FAILURES[where](patch, engine)
        with pytest.raises(Injected):
            run(engine, range(2, 3), 3)
            engine.drain()
    assert own_threads() == []
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        run(engine, range(2, 3), 3)
    engine.load_state(saved, step=2)
    gc.collect()  # the traceback's frames refer to each other
    assert engine._machine.meter.now == at_rest
    run(plain, range(2), 3)
    assert_same(run(engine, range(2, 4), 3), run(plain, range(2, 4), 3))
    assert_same_state(engine, plain)


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
    assert own_threads() == []


@pytest.mark.parametrize("slices", [1, 3])
def test_a_forward_that_ends_early_is_an_error(make, slices):
    engine, _ = make("llama", slices=slices)
    engine._model.model.layers = engine._model.model.layers[:1]
    engine._model.lm_head = torch.nn.Linear(32, 128)
    with pytest.raises(RuntimeError, match="without a forward of block 4"):
        run(engine, range(1), slices)
    assert own_threads() == []


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
        Engine(
            model, plan=resident_plan(chain), chain=chain, optimizer=adamw(model), max_grad_norm=1.0, device=CPU
        )  # fmt: skip


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
    with pytest.raises(RuntimeError, match="closed"):
        run(engine, range(1), 1)


def test_an_interrupt_while_the_slices_are_started_ends_them_all(make, monkeypatch):
    engine, _ = make("llama", slices=3)
    calls = iter([KeyboardInterrupt()])

    def start(iterable, maxlen):
        for number, _ in enumerate(iterable):
            if number == 1 and (error := next(calls, None)):
                raise error

    monkeypatch.setattr("worker.engine.lockstep.deque", start)
    with pytest.raises(KeyboardInterrupt):
        run(engine, range(1), 3)
    assert own_threads() == []

"""Steps of several rounds: the numbers of plain accumulation, and weights that travel once a round."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from planner.schedule.compile import OpKind, compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import mixed_plan, resident_plan
from tests.support.engines import data, learning_rate
from worker.engine.actions import Actions
from worker.engine.device_items import Device

torch.set_num_threads(1)


def scheduled(step, count):
    """Micro-batches and the rest of `Engine.step`'s arguments."""
    batches, rest = data(step, count)
    return batches, {**rest, "learning_rate": learning_rate(step)}


def assert_equal_steps(engine, plain, steps, count):
    for step in steps:
        batches, rest = scheduled(step, count)
        got, expected = engine.step(batches, **rest), plain.step(batches, **rest)
        assert len(got.losses) == count
        assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True)), f"losses of {step}"
        assert got.grad_norm is None or torch.equal(got.grad_norm, expected.grad_norm), f"norm of {step}"
    expected = dict(plain.state())
    for name, parts in engine.state():
        assert all(torch.equal(t, expected[name][key]) for key, t in parts.items()), name


@pytest.mark.sweep(4)
@pytest.mark.parametrize("clip", [None, 0.5], ids=["free", "clipped"])
@pytest.mark.parametrize(("rounds", "slices"), [(2, 2), (4, 1)])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounds_equal_plain_accumulation_bitwise(make, name, rounds, slices, clip):
    engine, plain = make(name, rounds=rounds, slices=slices, clip=clip)
    assert_equal_steps(engine, plain, range(4), rounds * slices)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("plan_of", [mixed_plan, resident_plan], ids=["mixed", "resident"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounds_in_bf16_with_masters_equal_plain_accumulation_bitwise(make, name, plan_of):
    engine, plain = make(name, plan_of, rounds=3, slices=2, clip=0.5, dtype=torch.bfloat16)
    assert_equal_steps(engine, plain, range(3), 6)


def test_the_weights_cross_to_the_device_once_a_round(make, monkeypatch):
    crossed = Counter()
    fetch = Device.fetch

    def counted(self, *items):
        for item in items:
            crossed[item[0]] += sum(t.nbytes for t in self.items[item])
        fetch(self, *items)

    monkeypatch.setattr(Device, "fetch", counted)
    by_rounds = {}
    for rounds in (1, 2, 4):
        crossed.clear()
        engine, _ = make("llama", rounds=rounds, slices=4 // rounds)
        batches, rest = scheduled(0, 4)
        engine.step(batches, **rest)
        engine.drain()
        by_rounds[rounds] = dict(crossed)
    layers = engine.chain.blocks[1:4]
    sizes = [sum(t.bytes for t in block.tensors) for block in layers]
    gradients = [sum(t.gradient_bytes for t in block.tensors) for block in layers]
    once = 2 * sizes[0] + 2 * sizes[1] + sizes[2]  # forward and backward; the last layer stays in between
    for rounds, bytes_of in by_rounds.items():
        assert bytes_of["w"] == rounds * once  # however many slices a round has
        assert bytes_of.get("g", 0) == (rounds - 1) * sum(gradients)
        assert bytes_of["s"] == by_rounds[1]["s"]


def test_a_step_of_rounds_does_what_the_program_says(make, monkeypatch):
    done = Counter()
    perform = Actions.perform
    monkeypatch.setattr(Actions, "perform", lambda self, ops, values: (perform(self, ops, values), done.update(ops)))
    engine, _ = make("llama", rounds=2, slices=2)
    for step in range(2):
        batches, rest = scheduled(step, 4)
        engine.step(batches, **rest)
    engine.drain()
    program = compile_program(engine.plan, engine.chain)
    assert done == {op: 2 for op in program.ops if op.kind is not OpKind.RUN}


@pytest.mark.parametrize(("plan_of", "rounds", "slices"), [(mixed_plan, 2, 2), (resident_plan, 4, 1)])
def test_the_peak_of_rounds_is_the_predicted_one(make, plan_of, rounds, slices):
    engine, _ = make("llama", plan_of, rounds=rounds, slices=slices, metered=True)
    predicted = gpu_peak_bytes(compile_program(engine.plan, engine.chain), engine.chain)
    slack = 1024 + sum(t.gradient_bytes for t in engine.chain.frame_tensors)
    for step in range(2):
        batches, rest = scheduled(step, 4)
        assert predicted - slack <= engine.step(batches, **rest).peak_bytes <= predicted


def test_saving_between_steps_of_rounds_changes_no_bit(make):
    first, plain = make("llama", rounds=2, slices=2)
    second, _ = make("llama", rounds=2, slices=2)
    assert_equal_steps(first, plain, range(2), 4)
    second.load_state([(name, {k: t.clone() for k, t in parts.items()}) for name, parts in first.state()], step=2)
    assert_equal_steps(second, plain, range(2, 4), 4)


def test_the_micro_batches_of_all_rounds_must_be_given(make):
    engine, _ = make("llama", rounds=2, slices=2)
    batches, rest = scheduled(0, 2)
    with pytest.raises(ValueError, match=r"2 batches, 2 seeds for a plan of 2 × 2 slices"):
        engine.step(batches, **rest)

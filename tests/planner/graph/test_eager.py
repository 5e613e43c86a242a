"""Layers that cannot be traced run by their own code: chosen by itself, said, as exact, within the predicted bytes."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from planner.errors import UserError
from planner.graph import RECIPES, EagerPair
from planner.measure.analysis import analyse_model
from planner.schedule.compile import compile_program
from planner.schedule.forward_program import forward_peak_bytes
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.families import assert_bitwise, family_model, masked_batch, trained
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")


def mixtral(dtype=torch.float32, experts="eager"):
    """Its experts' code asks which rows chose each of them."""
    return family_model("mixtral", dtype, experts_implementation=experts)


def with_mlp(change, name="llama"):
    """A model whose layers' MLPs are `change(layer index, own forward, input)`."""
    model = make_model(name)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.forward = functools.partial(change, index, layer.mlp.forward)
    return model


def moody():
    return with_mlp(lambda index, own, x: own(x) if x.sum() > 0 else own(x) * 2)


def counting():
    """The second layer counts its calls in a buffer."""
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.register_buffer("seen", torch.zeros(()), persistent=False)
    own = mlp.forward
    mlp.forward = lambda x: (mlp.seen.add_(1), own(x))[1]
    return model


def replacing():
    """The second layer's result depends on a buffer that each call replaces."""
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.register_buffer("scale", torch.ones(()), persistent=False)
    own = mlp.forward

    def forward(x):
        before = own(x) * mlp.scale
        mlp.scale = mlp.scale * 1.5
        return before * mlp.scale

    mlp.forward = forward
    return model


def growing(rows=1):
    """The second layer's result depends on a buffer that each call changes."""
    model = make_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.register_buffer("scale", torch.ones(rows, 1, 1), persistent=False)
    own = mlp.forward
    mlp.forward = lambda x: own(x) * mlp.scale.mul_(1.5)[0].clone()
    return model


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_mixture_whose_code_looks_at_data_equals_plain_pytorch_bitwise(dtype):
    assert_bitwise(trained(functools.partial(mixtral, dtype), masked_batch, slices=2, steps=3, clip=0.5))


@pytest.mark.parametrize("make", [functools.partial(mixtral, experts="grouped_mm"), moody], ids=["grouped_mm", "if"])
def test_any_code_that_cannot_be_traced_equals_plain_pytorch_bitwise(make):
    assert_bitwise(trained(make, batch_of, slices=2, steps=3))


def test_the_layers_that_fall_back_are_named_with_the_reason(caplog):
    def change(index, own, x):
        return own(x) if index == 2 or x.sum() > 0 else own(x) * 2

    with caplog.at_level(logging.WARNING):
        analysis = analyse_model(with_mlp(change), batch_of(), device=CPU)
    layers = [f"model.layers.{i}" for i in range(3)]
    assert list(analysis.eager) == layers  # those alike are not looked into one by one
    assert "model.layers.0.mlp" in analysis.eager[layers[0]] and "data" in analysis.eager[layers[0]].lower()
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("model: model.layers.0 and 2 more run by their own code, recomputed in backward")
    assert analyse_model(make_model("llama"), batch_of(), device=CPU).eager == {}


def test_only_the_kind_that_cannot_be_traced_falls_back():
    chain = chain_of(counting())
    first, second, third = ([option.name for option in block.options] for block in chain.blocks[1:4])
    assert second == ["eager"]
    assert first[: len(RECIPES)] == third[: len(RECIPES)] == [*RECIPES]


def test_a_buffer_that_a_layer_changes_changes_once_a_slice():
    model = counting()
    chain = chain_of(model)
    engine = Engine(
        model, plan=mixed_plan(chain, slices=2), chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU
    )
    engine.step([batch_of(0), batch_of(1)], seeds=[0, 1], learning_rate=1e-3)
    engine.close()
    assert model.model.layers[1].mlp.seen == 2


@pytest.mark.sweep(6)
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("make", [growing, replacing])
def test_a_layer_that_reads_a_buffer_that_it_changes_equals_plain_pytorch_bitwise(make, slices):
    assert_bitwise(trained(make, batch_of, slices=slices, steps=2))


def test_the_copies_of_a_buffer_that_a_layer_may_change_are_in_the_predicted_peak():
    model = growing(2**16)
    chain = chain_of(model)
    plan = resident_plan(chain, slices=2)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    peak = engine.step([batch_of(0), batch_of(1)], seeds=[0, 1], learning_rate=1e-3).peak_bytes
    engine.close()
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    assert 0.9 * predicted <= peak <= predicted, peak / predicted


@pytest.mark.sweep(4)
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_the_predicted_peak_is_an_upper_bound_and_not_far_off(experts, slices):
    model = mixtral(experts=experts)
    chain = chain_of(model)
    plan = resident_plan(chain, slices=slices)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    alike = {name: torch.full_like(t, 7) for name, t in batch_of().items()}  # all rows choose the same experts
    peaks = []
    for step, batch in enumerate((batch_of(), alike)):
        result = engine.step([batch] * slices, seeds=[step] * slices, learning_rate=1e-3)
        peaks.append(result.peak_bytes)
    engine.close()
    assert 0.9 * predicted <= max(peaks) <= predicted, [peak / predicted for peak in peaks]


def test_evaluation_runs_layers_whose_code_looks_at_data():
    model, plain = mixtral(), mixtral().eval()
    chain = chain_of(model)
    engine = Engine(
        model,
        plan=mixed_plan(chain),
        chain=chain,
        optimizer=adamw(model),
        max_grad_norm=None,
        device=CPU,
        metered=True,
    )
    found = engine.evaluate([masked_batch(1), masked_batch(2)])
    engine.close()
    with torch.no_grad():
        assert all(torch.equal(loss, plain(**masked_batch(i)).loss) for i, loss in enumerate(found.losses, start=1))
    assert found.peak_bytes <= engine._plan.gpu_budget_bytes


def test_a_layer_that_cannot_run_at_all_is_refused_with_both_reasons():
    def change(index, own, x):
        raise ValueError("no such thing")

    with pytest.raises(UserError, match="can neither be traced nor run as it is: ValueError: no such thing") as told:
        chain_of(with_mlp(change))
    assert told.value.code == "block-not-usable"
    assert told.value.numbers == ("Block model.layers.0.mlp cannot be traced: ValueError: no such thing",)


def test_an_embedding_or_head_that_cannot_be_traced_is_refused():
    model = make_model("llama")
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x) if x.sum() > 0 else own(x) * 2
    with pytest.raises(UserError, match="lm_head cannot be traced") as told:
        chain_of(model)
    assert told.value.code == "block-not-traceable"


@pytest.mark.parametrize("make", [mixtral, moody])
def test_layers_that_cannot_be_traced_evaluate_and_write_as_the_plain_model_within_what_is_predicted(make):
    model, plain = make(), make()
    chain = chain_of(model)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=mixed_plan(chain), chain=chain, device=CPU, metered=True, **settings)
    reference, forward = PlainEngine(plain, **settings), engine._forward_only
    data, prompts = [batch_of(k) for k in range(3)], [[5, 6, 7], [9, 10, 11]]
    got, expected = engine.evaluate(data), reference.evaluate(data)
    assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
    measured = forward._measure(data)
    assert got.peak_bytes <= forward_peak_bytes(forward._program(measured, 3), chain, measured)
    assert engine.generate(prompts, new_tokens=12, pad=2) == reference.generate(prompts, new_tokens=12, pad=2)
    measured = forward._measure_generation(2, 3, 12)
    assert engine._machine.meter.peak <= forward_peak_bytes(forward._program(measured, 1), chain, measured)
    engine.close()


def test_a_frozen_layer_that_no_gradient_leaves_runs_nothing_in_backward():
    runs = []
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    x = torch.randn(2, 4)
    pair = EagerPair.measured(layer, (x,), {}, name="layer", reason="its code looks at data")
    weights = [p.data for p in layer.parameters()]
    _, states = pair.forward([*weights, x])
    runs.clear()
    assert pair.backward([*weights, x], states, lambda *_: None) == [None]
    assert not runs and pair.backward_peak == {True: 0, False: 0}

"""Models whose forward enters autocast: fp32 weights, bf16 matmuls."""

from __future__ import annotations

import functools

import pytest
import torch

from planner.errors import UserError
from planner.measure.analysis import analyse_model
from planner.schedule.compile import compile_program
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, mixed_plan
from tests.support.families import assert_bitwise, family_model, masked_batch, trained
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")
SETTINGS = {"opt": {}, "bloom": {}, "gemma2": {}, "mixtral": {"experts_implementation": "eager"}}


def cast(name):
    """OPT's frame has matmuls with weights, Bloom a block of eager attention; this Mixtral runs by its own code."""
    model = family_model(name, **SETTINGS[name])
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_under_autocast_equals_plain_pytorch_bitwise(name):
    both = trained(functools.partial(cast, name), masked_batch, slices=2, steps=2, clip=0.5)
    assert_bitwise(both)
    assert not torch.equal(both[0]["loss 0.0"], without(name))


def without(name):
    """The loss of the first micro-batch with no autocast, in plain PyTorch."""
    model, batches = family_model(name), [masked_batch(k) for k in range(2)]
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    plain = PlainEngine(model, optimizer=adamw(model), max_grad_norm=None)
    return plain.step(batches, seeds=[0, 1], learning_rate=1e-3, num_items_in_batch=count).losses[0]


def twice_by_its_own_code():
    """Each layer runs its MLP twice, and looks at data: autocast has one cast of its weights, whose gradients add up in
    bf16."""
    model = cast("opt")
    for layer in model.model.decoder.layers:
        layer.fc1.forward = lambda x, own=layer.fc1.forward: own(x) + (own(x * 2) if x.isfinite().all() else 0)
    return model


def test_own_code_that_uses_a_weight_twice_under_autocast_equals_plain_pytorch_bitwise():
    assert_bitwise(trained(twice_by_its_own_code, masked_batch, slices=2, steps=2))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_under_autocast_are_predicted(name):
    model = cast(name)
    chain = chain_of(model)
    plan = mixed_plan(chain, slices=2)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    peaks = [
        engine.step([batch_of(2 * step), batch_of(2 * step + 1)], seeds=[0, 1], learning_rate=1e-3).peak_bytes
        for step in range(2)
    ]
    engine.close()
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    assert 0.9 * predicted <= max(peaks) <= predicted, max(peaks) / predicted


def test_chunks_of_the_loss_are_refused_under_autocast():
    with pytest.raises(UserError, match="its logits for a loss under autocast") as told:
        analyse_model(cast("gemma2"), batch_of(), device=CPU, chunk_rows=8)
    assert told.value.code == "loss-not-in-chunks"


def test_autocast_around_the_engine_is_refused_with_the_way_to_do_it():
    model = family_model("llama")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError) as told:
        chain_of(model)
    assert told.value.code == "autocast-outside"
    assert 'model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)' in str(told.value)
    chain = chain_of(model)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine, plain = Engine(model, plan=mixed_plan(chain), chain=chain, device=CPU, **settings), family_model("llama")
    step = {"seeds": [0], "learning_rate": 1e-3}
    for use in (
        lambda: engine.step([batch_of()], **step),
        lambda: engine.evaluate([batch_of()]),
        lambda: engine.check_evaluation([batch_of()]),
        lambda: engine.generate([[5, 6]], new_tokens=2, pad=0),
        lambda: engine.check_generation([[5, 6]], new_tokens=2),
    ):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="inside torch"):
            use()
    (loss,) = engine.step([batch_of()], **step).losses  # nothing was torn
    engine.close()
    assert torch.equal(loss, PlainEngine(plain, **settings).step([batch_of()], **step).losses[0])

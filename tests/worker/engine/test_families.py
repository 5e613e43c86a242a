"""Every family of language models, trained under a plan that mixes everything, against plain PyTorch. Some tests take
seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import functools

import pytest
import torch

from planner.measure.analysis import analyse_model
from planner.schedule.forward_program import forward_peak_bytes
from tests.support.engine_plans import adamw, mixed_plan, resident_plan, streaming_plan, timed
from tests.support.families import FAMILIES, analysis_of, assert_bitwise, family_model, masked_batch, t5, trained
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of
from worker.engine.engine import Engine

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_plain_pytorch_bitwise(family):
    make = functools.partial(family_model, family)
    assert_bitwise(trained(make, batch_of, slices=1, steps=2, analysis=analysis_of(family)))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gemma4", "mixtral", "opt"])
def test_a_family_evaluates_and_writes_as_the_plain_model_within_what_is_predicted(family):
    """Sliding windows, soft caps, positions that padding moves, routers: all go through the model's own code."""
    model, plain = family_model(family), family_model(family)
    chain = timed(analysis_of(family))
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=mixed_plan(chain), chain=chain, device=torch.device("cpu"), metered=True, **settings)
    reference, forward = PlainEngine(plain, **settings), engine._forward_only
    data, prompts = [masked_batch(k) for k in range(3)], [[5, 6, 7], [9, 10, 11, 12, 13], [3]]
    got, expected = engine.evaluate(data), reference.evaluate(data)
    assert all(torch.equal(a, b) for a, b in zip(got.losses, expected.losses, strict=True))
    measured = forward._measure(data)
    assert got.peak_bytes <= forward_peak_bytes(forward._program(measured, 3), chain, measured)
    plain.config.output_router_logits = False  # plain generate fails on padded prompts with it
    assert engine.generate(prompts, new_tokens=12, pad=2) == reference.generate(prompts, new_tokens=12, pad=2)
    measured = forward._measure_generation(3, 5, 12)
    assert engine._machine.meter.peak <= forward_peak_bytes(forward._program(measured, 1), chain, measured)
    engine.close()


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_with_a_mask_in_two_slices_of_bf16_equal_plain_pytorch_bitwise(family):
    make = functools.partial(family_model, family, torch.bfloat16)
    assert_bitwise(trained(make, masked_batch, slices=2, steps=2, clip=0.5))


def test_a_mixtures_auxiliary_loss_reads_the_routers_inside_the_blocks():
    results = {}
    for coefficient in (0.0, 0.5):
        make = functools.partial(family_model, "mixtral", router_aux_loss_coef=coefficient)
        both = trained(make, masked_batch, slices=2, steps=2)
        assert_bitwise(both)
        results[coefficient] = both[0]
    router = "model.layers.0.mlp.gate.weight"
    assert results[0.5]["loss 0.0"] > results[0.0]["loss 0.0"] + 0.5  # 2 when experts are used alike
    assert not torch.equal(results[0.5][router], results[0.0][router])


def test_an_encoder_decoder_equals_plain_pytorch_bitwise():
    """What the encoder made is read twice in each layer of the decoder; autograd adds up all of that one by one."""
    plan = {"plan_of": streaming_plan, "analysis": analysis_of("t5")}
    assert_bitwise(trained(t5, batch_of, slices=1, steps=3, sums=False, **plan))


def test_an_encoder_decoder_equals_plain_pytorch_within_rounding_with_several_micro_batches():
    got, expected = trained(t5, masked_batch, slices=2, steps=3, plan_of=streaming_plan, sums=False)
    # The embedding's three gradients add up micro-batch by micro-batch there.
    assert torch.equal(got["loss 0.0"], expected["loss 0.0"])
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_keys_and_values_that_several_layers_take_get_their_gradients_in_autograds_order():
    layers = ["sliding_attention", *["full_attention"] * 4]
    settings = {"num_hidden_layers": 5, "layer_types": layers, "num_kv_shared_layers": 3}
    make = functools.partial(family_model, "gemma4", torch.bfloat16, **settings)
    analysis = analyse_model(make(), masked_batch(), device=torch.device("cpu"))
    assert analysis.inexact == ()
    assert_bitwise(trained(make, masked_batch, slices=2, steps=2, plan_of=streaming_plan, analysis=analysis))


def test_what_is_equal_within_rounding_only_is_said_with_the_reasons():
    (reason,) = analysis_of("t5").inexact
    assert reason.startswith("with several micro-batches, weights are shared by others")
    for family in ("llama", "gpt2", "gemma4"):
        assert analysis_of(family).inexact == ()


def test_a_weight_that_the_model_reads_between_several_blocks_is_named_as_exact_with_one_micro_batch_only():
    def make():
        model = family_model("llama")
        model.model.between = torch.nn.Parameter(torch.ones(32))
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, out: out * model.model.between)
        return model

    analysis = analyse_model(make(), batch_of(), device=torch.device("cpu"))
    (reason,) = analysis.inexact
    assert reason == "with several micro-batches, the model reads model.between between several blocks"
    assert_bitwise(trained(make, batch_of, slices=1, steps=2, analysis=analysis))
    both = trained(make, batch_of, slices=3, steps=2, analysis=analysis)
    for name, value in both[1].items():
        torch.testing.assert_close(both[0][name], value, rtol=0, atol=1e-6, msg=name)


def test_a_weight_of_a_block_that_no_gradient_reaches_stays_as_it_is():
    def make():
        model = family_model("llama")
        model.model.layers[1].register_parameter("spare", torch.nn.Parameter(torch.ones(4, 4)))
        return model

    got, expected = both = trained(make, batch_of, slices=2, steps=2, clip=0.5, plan_of=resident_plan)
    assert_bitwise(both)
    spare = "model.layers.1.spare"
    assert torch.equal(got[spare], torch.ones(4, 4)) and got[spare].requires_grad and expected[spare].requires_grad

"""Training with a loss that compares whole rows, whose head runs in chunks: it asks for the loss of each position, so
that the head's gradients can be computed only after its forward."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from planner.measure.analysis import analyse_model, measure_times
from planner.measure.machine_rates import estimate_hardware
from planner.schedule.compile import compile_program
from planner.schedule.forward_program import forward_peak_bytes
from planner.schedule.memory_use import gpu_peak_bytes
from tests.support.engine_plans import adamw, chain_of, mixed_plan, resident_plan
from tests.support.plain_engine import PlainEngine
from tests.support.tiny_models import batch_of, make_model
from worker.engine.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")
LARGE = {"rows": 2, "length": 64, "vocabulary": 4096}


def pairwise(logits, labels, vocab_size, num_items_in_batch=1, **_):
    """Compares the loss of the first rows with that of the last ones, and learns the first ones a bit."""
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    each = F.cross_entropy(logits.float().view(-1, vocab_size), targets, reduction="none").view(labels.shape)
    good, bad = each.sum(1).chunk(2)
    return (F.softplus(0.05 * (good - bad)) + 0.02 * good).sum() / num_items_in_batch


def model_of(name, frozen=(), **shape):
    model = make_model(name, dropout=0.0, **shape)
    model.loss_function = pairwise
    for parameter_name, p in model.named_parameters():
        p.requires_grad_(not any(part in parameter_name for part in frozen))
    return model


@functools.cache
def chain_for(name, chunk, frozen=()):
    return chain_of(model_of(name, frozen), chunk_rows=chunk)


def step_of(engine, slices):
    """Losses, first moments (a tenth of the clipped gradients), and the result of one step."""
    batches = [batch_of(k, padded=k == 1) for k in range(slices)]
    result = engine.step(batches, seeds=range(slices), learning_rate=1e-3, num_items_in_batch=torch.tensor(slices))
    moments = {name: parts["exp_avg"].double().clone() for name, parts in engine.state()}
    return torch.stack(list(result.losses)).detach().clone(), moments, result


@pytest.mark.parametrize(
    ("name", "plan_of", "chunk", "slices", "frozen"),
    [
        ("llama", resident_plan, 7, 1, ()),
        ("llama", mixed_plan, 64, 1, ()),
        ("llama", mixed_plan, 7, 3, ()),
        ("qwen2", mixed_plan, 7, 3, ()),
        ("gpt2", resident_plan, 16, 2, ()),
        ("llama", resident_plan, 7, 2, ("lm_head",)),
        ("llama", resident_plan, 7, 2, ("embed_tokens", "layers.", "model.norm")),
    ],
)
def test_a_step_is_plain_pytorchs_within_rounding_and_stays_within_the_plan(name, plan_of, chunk, slices, frozen):
    model, plain, chain = model_of(name, frozen), model_of(name, frozen), chain_for(name, chunk, frozen)
    plan = plan_of(chain, slices=slices, clip=True)
    settings = {"optimizer": adamw(model), "max_grad_norm": 1.0}
    engine = Engine(model, plan=plan, chain=chain, device=CPU, metered=True, **settings)
    try:
        losses, moments, result = step_of(engine, slices)
    finally:
        engine.close()
    expected_losses, expected, _ = step_of(PlainEngine(plain, **settings), slices)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=0)
    assert moments.keys() == expected.keys()
    for weight, moment in expected.items():
        assert (moments[weight] - moment).norm() < 3e-6 * moment.norm(), weight
    assert result.peak_bytes <= gpu_peak_bytes(compile_program(plan, chain), chain)


@pytest.mark.parametrize("frozen", [(), ("lm_head",)], ids=["trained", "frozen"])
def test_the_peak_is_a_fraction_and_is_the_one_predicted(frozen):
    model = model_of("llama", frozen, vocabulary=4096)
    chain = chain_of(model, batch_of(**LARGE), chunk_rows=16)
    plan = resident_plan(chain)
    engine = Engine(model, plan=plan, chain=chain, optimizer=adamw(model), max_grad_norm=None, device=CPU, metered=True)
    result = engine.step([batch_of(**LARGE)], seeds=[1], learning_rate=1e-3, num_items_in_batch=torch.tensor(1))
    engine.close()
    predicted = gpu_peak_bytes(compile_program(plan, chain), chain)
    assert predicted - 2048 <= result.peak_bytes <= predicted
    assert chain.blocks[-1].options[0].forward_peak_bytes < 2 * 64 * 4096 * 4  # less than the logits in fp32


def test_evaluation_is_plain_pytorchs_and_stays_within_what_is_predicted():
    model, chain = model_of("llama"), chain_for("llama", 7)
    settings = {"optimizer": adamw(model), "max_grad_norm": None}
    engine = Engine(model, plan=mixed_plan(chain), chain=chain, device=CPU, metered=True, **settings)
    data = [batch_of(k, padded=k == 1) for k in range(3)]
    got, expected = engine.evaluate(data), PlainEngine(model_of("llama"), **settings).evaluate(data)
    forward = engine._forward_only
    measured = forward._measure(data)
    predicted = forward_peak_bytes(forward._program(measured, 3), forward._chain, measured)
    engine.close()
    torch.testing.assert_close(torch.stack(list(got.losses)), torch.stack(expected.losses), rtol=1e-6, atol=0)
    assert got.peak_bytes <= predicted


def test_the_time_measured_is_that_of_computing_the_logits_twice():
    analysis = analyse_model(model_of("llama", vocabulary=4096), batch_of(**LARGE), device=CPU, chunk_rows=16)
    products = Counter()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func == torch.ops.aten.mm.default:
                products[(*args[0].shape, args[1].shape[1])] += 1
            return func(*args, **(kwargs or {}))

    with Watched():
        measure_times(analysis, CPU, estimate_hardware(CPU), slices=1)
    logits, input_gradients = products[16, 32, 4096], products[16, 4096, 32]
    assert logits == 2 * input_gradients > 0

"""Every family of language models, trained under a plan that mixes everything, against plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.engine_plans import adamw, chain_of, mixed_plan
from tests.families import FAMILIES, family_model, masked_batch
from tests.plain import PlainEngine
from tests.tiny_models import batch_of
from worker.engine import Engine

torch.set_num_threads(1)
CPU = torch.device("cpu")


def trained(make_model, batches, *, slices, steps, clip=None, plan_of=mixed_plan):
    """Train two equal models, one under a plan. Returns the losses and the parameters of both, named."""
    model, plain = make_model(), make_model()
    settings = {"optimizer": adamw(model), "max_grad_norm": clip}
    chain = chain_of(model, batches(0))
    plan = plan_of(chain, slices=slices, clip=clip is not None)
    engines = Engine(model, plan=plan, chain=chain, device=CPU, **settings), PlainEngine(plain, **settings)
    losses = [{}, {}]
    for step in range(steps):
        given = [batches(10 * step + k) for k in range(slices)]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in given)
        seeds = [100 * step + k for k in range(slices)]
        for engine, found in zip(engines, losses, strict=True):
            result = engine.step(given, seeds=seeds, learning_rate=1e-3, num_items_in_batch=count)
            found.update({f"loss {step}.{k}": loss for k, loss in enumerate(result.losses)})
    engines[0].restore()
    return [{**found, **dict(m.named_parameters())} for found, m in zip(losses, (model, plain), strict=True)]


def assert_bitwise(both):
    got, expected = both
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_plain_pytorch_bitwise(family):
    assert_bitwise(trained(functools.partial(family_model, family), batch_of, slices=1, steps=2))


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

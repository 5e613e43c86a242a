"""Every family of language models, trained under a plan that mixes everything, against plain PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.families import FAMILIES, assert_bitwise, family_model, masked_batch, trained
from tests.tiny_models import batch_of

torch.set_num_threads(1)


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

"""Documents that are packed into one row do not see each other; a model in which they would is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.errors import UserError
from planner.measure.isolation import watching_isolation
from tests.support.families import FAMILIES, assert_bitwise, family_model, trained
from tests.support.tiny_models import batch_of

LEAKING = {"bloom", "opt"}


def packed(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of two documents, 6 and 10 tokens."""
    batch = batch_of(seed)
    positions = torch.cat((torch.arange(6), torch.arange(10))).repeat(2, 1)
    batch["labels"][:, [0, 6]] = -100
    return {**batch, "position_ids": positions}


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_of_a_row_do_not_see_each_other_or_the_model_is_refused(name: str) -> None:
    model, batch = family_model(name).eval(), packed()
    ids = batch["input_ids"]

    @torch.no_grad()
    def leak() -> float:
        with watching_isolation(model):
            together = model(**batch).logits
        apart = torch.cat((model(input_ids=ids[:, :6]).logits, model(input_ids=ids[:, 6:]).logits), 1)
        return float((together - apart).abs().max())

    if name in LEAKING:
        with pytest.raises(UserError, match="does not keep packed documents apart") as refused:
            leak()
        assert refused.value.code == "packing-not-isolated"
    else:
        assert leak() < 1e-6


def test_a_model_that_mixes_neighbouring_tokens_is_refused_by_the_name_of_what_does() -> None:
    model = family_model("llama")
    model.model.layers[0].mixer = nn.Conv1d(4, 4, 3)
    with pytest.raises(UserError) as refused, watching_isolation(model):
        model(**packed())
    assert "model.layers.0.mixer mixes neighbouring tokens" in refused.value.numbers[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_packed_rows_are_trained_bitwise(name: str) -> None:
    assert_bitwise(trained(lambda: family_model(name), packed, slices=2, steps=2, clip=0.5))

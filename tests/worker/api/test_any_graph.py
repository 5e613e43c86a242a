"""Models that are no chain of equal layers between an embedding and a head, in the hands of people with a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as T
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import UserError
from planner.graph import find_blocks, loss_of
from tests.support.unet import pictures, tiny_unet
from worker.api import prepare
from worker.data.seeds import micro_batch_seed

torch.set_num_threads(1)
Batch = dict[str, Tensor]


class Parts(nn.Module):
    """A plain chain of layers, with dropout and a norm that counts its batches, which cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(64, 32),
            nn.Tanh(),
            nn.Linear(32, 5),
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(pixel_values), labels)


def parts() -> nn.Module:
    torch.manual_seed(0)
    return Parts()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    config = T.ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=6,
        patch_size=2,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return T.ViTForImageClassification(config).train()


def images(seed: int) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(4, 3, 6, 6, generator=chance),
        "labels": torch.randint(0, 5, (4,), generator=chance),
    }


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("make", [parts, classifier])
def test_it_is_trained_with_plain_pytorchs_bits(make: Callable[[], nn.Module]) -> None:
    model, plain, batch = make(), make(), images
    engine = prepare(model, batch(0), optimizer=adamw(model), max_grad_norm=1.0, device="cpu", measure=False)
    optimizer = adamw(plain)
    for step in range(3):
        loss = engine.step(batch(step))
        torch.manual_seed(micro_batch_seed(0, step, 0))
        expected = loss_of(plain(**batch(step)))
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected)
    plain.eval()
    with torch.no_grad():
        assert torch.equal(engine.evaluate(batch(9)), loss_of(plain(**batch(9))))
    engine.restore()
    both = zip(model.named_parameters(), plain.parameters(), strict=True)
    assert [name for (name, one), other in both if not torch.equal(one, other)] == []


def test_its_segments_are_layers_and_what_stands_between_them() -> None:
    assert find_blocks(classifier(), images(0)).layers == (
        "vit.layers.0",
        "vit.layers.1",
        "vit.layers.2",
        "vit.layernorm",
    )
    found = find_blocks(tiny_unet(), pictures()).all
    assert found[:5] == ("time", "into", "down.0.blocks.0", "down.0.attentions.0", "down.0.resize")
    assert found[-5:] == ("up.1.attentions.0", "up.1.blocks.1", "up.1.attentions.1", "norm", "out")
    assert {"middle1", "attention", "middle2"} < set(found)


def test_what_it_cannot_do_is_said() -> None:
    model = parts()
    settings = {"optimizer": adamw(model), "device": "cpu", "measure": False}
    with pytest.raises(UserError, match="averages its loss within each micro-batch"):
        prepare(model, [images(0), images(1)], **settings)
    with pytest.raises(UserError, match="it is empty"):
        prepare(model, {}, **settings)
    engine = prepare(model, images(0), **settings)
    with pytest.raises(UserError, match="no tokens to weigh them by"):
        engine.evaluate([images(0), images(1)])
    with pytest.raises(UserError, match=r"Parts has no generate\(\) and cannot write texts"):
        engine.generate([[1]], new_tokens=1)
    engine.close()
    silent = parts()
    silent.forward = lambda pixel_values, labels: silent.net(pixel_values)
    with pytest.raises(UserError, match="forward gives no loss"):
        prepare(silent, images(0), **settings | {"optimizer": adamw(silent)})

"""Which jobs' weights can be read from the model's files as they are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.measure import files_of_weights
from planner.measure.files_of_weights import model_read_rate, weights_are_in_files
from tests.support.tiny_models import make_model


class Model(nn.Module):
    """One frozen weight."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "published", "computes", "expected"),
    [
        (Model(4, 4), torch.bfloat16, torch.bfloat16, True),
        (Model(4, 4), torch.float32, torch.bfloat16, False),  # rounded when they are loaded
        (Model(4, 4), None, torch.bfloat16, False),
        (Model(4, 4, dtype=torch.float32), torch.float32, torch.float32, True),
        (Model(2, 4, 4), torch.bfloat16, torch.bfloat16, False),  # experts, put together
        (Model(16, dtype=torch.uint8), torch.bfloat16, torch.bfloat16, False),  # quantized
    ],
)
def test_files_have_weights_that_are_published_as_they_are_used(
    model: nn.Module, published: torch.dtype | None, computes: torch.dtype, expected: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(files_of_weights, "model_config", lambda job: SimpleNamespace(dtype=published))
    monkeypatch.setattr(files_of_weights, "working_dtype", lambda job: computes)
    job = SimpleNamespace(model=str(tmp_path), add_tokens=None, init_lora_weights=True)
    assert weights_are_in_files(job, model) is expected  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").unlink()
    assert not weights_are_in_files(job, model)  # type: ignore[arg-type]


def test_a_models_files_are_read_to_know_how_fast_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert model_read_rate(SimpleNamespace(model=str(tmp_path), model_revision=None)) > 1e5  # type: ignore[arg-type]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_read_rate(SimpleNamespace(model="nobody/nothing-of-the-kind", model_revision=None)) == 0.0  # type: ignore[arg-type]

"""Which jobs' weights can be read from the model's files as they are."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner.models import files_of_weights
from planner.models.files_of_weights import model_read_rate, why_not_in_files
from tests.support.tiny_models import make_model


class Model(nn.Module):
    """A weight of the base, and one of an adapter."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "published", "computes", "why_not"),
    [
        (Model(4, 4), torch.bfloat16, torch.bfloat16, None),
        (Model(4, 4), torch.float32, torch.bfloat16, "they are in float32, and loaded as bfloat16"),
        (Model(4, 4), None, torch.bfloat16, "they are in a dtype that is not named, and loaded as bfloat16"),
        (Model(4, 4, dtype=torch.float32), torch.float32, torch.float32, None),
        (Model(2, 4, 4), torch.bfloat16, torch.bfloat16, "those of experts are put together"),
        (Model(16, dtype=torch.uint8), torch.bfloat16, torch.bfloat16, "they are quantized or unpacked"),
    ],
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_files_have_weights_that_are_published_as_they_are_used(
    method: str,
    model: nn.Module,
    published: torch.dtype | None,
    computes: torch.dtype,
    why_not: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(files_of_weights, "model_config", lambda job: SimpleNamespace(dtype=published))
    monkeypatch.setattr(files_of_weights, "working_dtype", lambda job: computes)
    if method == "full":  # then it has no adapter
        model = copy.deepcopy(model)
        del model.adapter
    job: Any = SimpleNamespace(model=str(tmp_path), add_tokens=None, init_lora_weights=True, method=method)
    assert why_not_in_files(job, model) == why_not
    (tmp_path / "model.safetensors").unlink()
    assert why_not_in_files(job, model) == "there are none: they begin random"
    assert why_not_in_files(job, model, runs=False) == why_not  # a config stands for its model


def test_a_models_files_are_read_to_know_how_fast_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert model_read_rate(SimpleNamespace(model=str(tmp_path), model_revision=None)) > 1e5  # type: ignore[arg-type]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert model_read_rate(SimpleNamespace(model="nobody/nothing-of-the-kind", model_revision=None)) == 0.0  # type: ignore[arg-type]

"""Which layers of a model get cores, and of what size."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import UserError
from planner.models.hf_model import skeleton_model
from planner.models.lsp import LinearWithCore, Shape, layers_with_cores, with_cores
from tests.support.lsp_jobs import lsp_job
from tests.support.tiny_models import batch_of, make_model
from worker.subspace.change import Projectors

ATTENTION, MLP = ("k_proj", "o_proj", "q_proj", "v_proj"), ("down_proj", "gate_proj", "up_proj")


def sizes(model: nn.Module) -> dict[str, set[int]]:
    """The sizes of the cores, by the last names of their layers."""
    found: dict[str, set[int]] = {}
    for name, layer in layers_with_cores(model):
        assert layer.core.shape == (layer.shape.size, layer.shape.size)
        found.setdefault(name.rpartition(".")[2], set()).add(layer.shape.size)
    return found


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_every_linear_layer_but_the_head_gets_a_core(tmp_path: Path, name: str) -> None:
    job = lsp_job(tmp_path, name)
    model = skeleton_model(job)
    names = [
        f"model.layers.{k}.{part}"
        for k in range(3)
        for part in (*(f"self_attn.{leaf}" for leaf in ATTENTION), *(f"mlp.{leaf}" for leaf in MLP))
    ]
    assert sorted(layer for layer, _ in layers_with_cores(model)) == sorted(names)
    assert trained(model) == {f"{layer}.core" for layer in names}
    assert not isinstance(model.lm_head, LinearWithCore)
    parts = ("columns", "values", "rotation")
    added = {f"{layer}.{side}.{part}" for layer in names for side in ("left", "right") for part in parts}
    assert Projectors(model, job).added == added | trained(model)


def test_what_is_trained_whole_gets_no_core(tmp_path: Path) -> None:
    model = skeleton_model(lsp_job(tmp_path, trainable=["model.layers.[01].mlp", "model.norm", ".*q_proj"]))
    cores = {name for name, _ in layers_with_cores(model)}
    assert len(cores) == 3 * 3 + 3 and not any("q_proj" in name for name in cores)
    assert {name for name in cores if "mlp" in name} == {f"model.layers.2.mlp.{leaf}" for leaf in MLP}
    whole = {f"model.layers.{k}.mlp.{leaf}.weight" for k in (0, 1) for leaf in MLP}
    whole |= {f"model.layers.{k}.self_attn.q_proj.weight" for k in range(3)} | {"model.norm.weight"}
    assert trained(model) == whole | {f"{name}.core" for name in cores}


@pytest.mark.parametrize(
    ("size", "nonzeros", "narrow", "wide"),
    [
        (512, 4, 32, 64),  # k_proj and v_proj are 64 × 128, all others at least 128 × 128
        (48, 4, 32, 48),
        (32, 4, 32, 32),
        (512, 5, 30, 60),
        (512, None, 32, 64),
        (50, None, 32, 50),
        (64, 64, None, 64),
    ],
)
def test_the_size_is_half_of_the_shorter_side_at_most_and_a_multiple_of_the_nonzeros(
    tmp_path: Path, size: int, nonzeros: int | None, narrow: int | None, wide: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = lsp_job(tmp_path).model_copy(update={"lsp_size": size, "lsp_nonzeros": nonzeros})
    with caplog.at_level(logging.INFO, "planner.models.lsp"):
        model = skeleton_model(job)
    wanted = {leaf: {narrow if leaf in ("k_proj", "v_proj") else wide} for leaf in (*ATTENTION, *MLP)}
    assert sizes(model) == {leaf: found for leaf, found in wanted.items() if found != {None}}
    assert ("too narrow for a core" in caplog.text) == (narrow is None)


@pytest.mark.parametrize(
    ("nonzeros", "fit_steps", "parts"),
    [
        (4, 0, {"columns": (64, 4), "values": (64, 4), "rotation": (32, 32)}),
        (4, 7, {"columns": (64, 4), "values": (64, 4)}),
        (None, 0, {"dense": (64, 32)}),
    ],
)
def test_the_tensors_of_projectors(
    tmp_path: Path, nonzeros: int | None, fit_steps: int, parts: dict[str, tuple[int, int]]
) -> None:
    model = skeleton_model(lsp_job(tmp_path, lsp_nonzeros=nonzeros, lsp_fit_steps=fit_steps, bf16=True))
    layer = model.model.layers[0].self_attn.k_proj
    assert layer.shape == Shape(32, nonzeros, rotated=nonzeros is not None and not fit_steps)
    assert {name: tuple(part.shape) for name, part in layer.left.named_parameters()} == parts
    assert len(next(layer.right.parameters())) == 128
    types = {name: part.dtype for name, part in layer.left.named_parameters()}
    assert types == {name: torch.int16 if name == "columns" else torch.bfloat16 for name in parts}


@pytest.mark.parametrize(("name", "keys"), [("gpt2", {}), ("llama", {"lsp_size": 65, "lsp_nonzeros": 65})])
def test_a_model_without_a_layer_for_a_core_is_refused(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    """GPT-2 has layers of its own kind; half of Llama's shorter sides is 64 at most."""
    job = lsp_job(tmp_path, name, **keys)
    with pytest.raises(UserError) as refused:
        skeleton_model(job)
    assert refused.value.code == "lsp-no-layer"
    assert refused.value.numbers == (f"lsp_size: {job.lsp_size}, lsp_nonzeros: {job.lsp_nonzeros}",)


def test_a_model_with_new_cores_computes_as_before(tmp_path: Path) -> None:
    plain, batch = make_model("qwen2").eval(), batch_of()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
        before = plain(**batch).logits
        model = with_cores(plain, lsp_job(tmp_path))
        assert model is plain and len(list(layers_with_cores(model))) == 21
        assert torch.equal(model(**batch).logits, before)


def test_a_linear_module_outside_of_layers_or_at_two_places_gets_no_core(tmp_path: Path) -> None:
    """Gemma 4 has one outside of its layers, which no block runs."""
    model = make_model("llama")
    model.model.projection = nn.Linear(64, 64)
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    names = {name for name, _ in layers_with_cores(with_cores(model, lsp_job(tmp_path)))}
    assert len(names) == 21 - 2 and not any("projection" in name for name in names)

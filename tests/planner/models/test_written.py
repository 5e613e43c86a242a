"""The dtype that a model is written in: what its base says, what a job asks for, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from planner.job.schema import Job
from planner.models.written import said_of_dtype, written_dtype
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROUNDED = "The base is published in {}. Its weights are rounded to bfloat16, in which the model computes."
COMPUTES = "The model computes in {}."
WRITTEN = "The trained model is written in {} (like its base; save_dtype asks for another)."
ASKED = "The trained model is written in {} (save_dtype)."


def job_of(tmp_path: Path, named: str | None, **keys: object) -> Job:
    folder = tiny_llama_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": named}))
    return make_job(folder, write_jsonl(tmp_path / "d.jsonl", sentences(2)), **keys)


@pytest.mark.parametrize(
    ("named", "keys", "written", "said"),
    [
        ("float32", {"bf16": False}, FP32, None),
        ("bfloat16", {"bf16": True}, BF16, None),
        ("float32", {"bf16": True}, FP32, f"{ROUNDED.format('float32')} {WRITTEN.format('float32')}"),
        ("float16", {"bf16": True}, FP16, f"{ROUNDED.format('float16')} {WRITTEN.format('float16')}"),
        (
            "bfloat16",
            {"bf16": False},
            BF16,
            f"The base is published in bfloat16. {COMPUTES.format('float32')} {WRITTEN.format('bfloat16')}",
        ),
        (
            "float32",
            {"bf16": True, "save_dtype": "bfloat16"},
            BF16,
            f"{ROUNDED.format('float32')} {ASKED.format('bfloat16')}",
        ),
        ("float32", {"save_dtype": "float16"}, FP16, f"{COMPUTES.format('float32')} {ASKED.format('float16')}"),
        (None, {"bf16": True}, BF16, None),  # no weights either: there is no base
        (None, {"save_dtype": "bfloat16"}, BF16, f"{COMPUTES.format('float32')} {ASKED.format('bfloat16')}"),
    ],
)
def test_a_model_is_written_as_its_base_unless_asked(
    tmp_path: Path, named: str | None, keys: dict[str, object], written: torch.dtype, said: str | None
) -> None:
    job = job_of(tmp_path, named, **keys)
    assert (written_dtype(job), said_of_dtype(job)) == (written, said)


@pytest.mark.parametrize("named", [None, "float32"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_what_a_base_is_published_in_is_the_dtype_of_most_of_its_bytes(
    tmp_path: Path, dtype: torch.dtype, named: str | None
) -> None:
    job = job_of(tmp_path, named, bf16=True)
    tensors = {
        "a.packed": torch.zeros(2000, dtype=torch.int64),
        "b.norm": torch.zeros(2),
        "c": torch.zeros(90, dtype=dtype),
    }
    save_file(tensors, Path(job.model) / "model.safetensors")
    assert written_dtype(job) == dtype


def test_weights_in_an_older_form_without_a_named_dtype_are_taken_for_fp32(tmp_path: Path) -> None:
    job = job_of(tmp_path, None, bf16=True)
    torch.save({}, Path(job.model) / "pytorch_model.bin")
    assert written_dtype(job) == FP32
    written = WRITTEN.format("float32").replace("like its base", "as the base names no dtype")
    assert said_of_dtype(job) == f"{COMPUTES.format('bfloat16')} {written}"


def test_adapters_are_written_in_fp32_whatever_is_asked_for_which_is_said(tmp_path: Path) -> None:
    job = job_of(tmp_path, "bfloat16")
    save_file({"a": torch.zeros(2)}, Path(job.model) / "model.safetensors")
    lora = make_job(Path(job.model), tmp_path / "d.jsonl", method="lora", bf16=True, save_dtype="bfloat16")
    assert (written_dtype(lora), said_of_dtype(lora)) == (FP32, ROUNDED.format("float32"))
    assert "save_dtype is not used: adapters are written in float32." in lora.notes


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ("torch_dtype: bfloat16", "bfloat16"),
        ("dtype: float32", "float32"),
        ("dtype: auto", None),
        ("pure_bf16: true", "bfloat16"),
        ("bf16: true\npure_bf16: false", None),
        ("bf16: true", None),
        ("dtype: bfloat16\nsave_dtype: float32", "float32"),
        ("dtype: bfloat16\nsave_dtype: null", None),
    ],
)
def test_other_tools_keys_of_what_dtype_the_weights_have_ask_for_it(
    tmp_path: Path, keys: str, asked: str | None
) -> None:
    job = job_of(tmp_path, "bfloat16")
    text = f"model: {job.model}\ndataset: {tmp_path / 'd.jsonl'}\n{keys}\n"
    found = Job.parse(text, tmp_path)
    assert found.save_dtype == asked
    assert Job.parse(found.resolved_yaml(), tmp_path).save_dtype == asked

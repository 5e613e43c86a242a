"""Model folders are written in their base's dtype: masters, rounded once. Some tests take seconds: a model is traced
for its plan, and again for its engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from planner.commands.plan_job import plan_job
from planner.job.schema import Job
from planner.run.folder import RunFolder
from tests.support.runs import make_run
from tests.support.texts import tiny_llama_folder
from tests.worker.training.test_planned_on_disk import planned
from tests.worker.training.test_run import plainly_trained
from worker.storage.model_folder import Output
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def published(tmp_path: Path, dtype: torch.dtype) -> None:
    """Have the model of the jobs in this folder be published in `dtype`."""
    folder = tiny_llama_folder(tmp_path / "model")
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.save_pretrained(folder)


def partly_trained(tmp_path: Path, **keys: object) -> tuple[Job, RunFolder]:
    """A run that trains one layer and the head."""
    whole, run = make_run(tmp_path, "llama", bf16=True, **keys)
    job = whole.model_copy(update={"trainable": ("model.layers.1.", "lm_head")})
    run.write_resolved(job.resolved_yaml())
    run.plan.write_text(json.dumps(plan_job(job, torch.device("cpu"), cache=None, measure=False).to_json()))
    return job, run


def assert_is_masters(job: Job, run: RunFolder, dtype: torch.dtype) -> None:
    """The model folder has plain PyTorch's masters, rounded to `dtype` once, and what loads it has them, too."""
    _, plain = plainly_trained(job, run)
    masters = {name: parts["master"] for name, parts in plain.state()}
    trained: Any = AutoModelForCausalLM.from_pretrained(run.output)
    assert trained.dtype == dtype
    parameters = dict(trained.named_parameters())
    assert masters.keys() == {n for n, p in plain.model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in plain.model.named_parameters() if not p.requires_grad}
    wanted = {name: tensor.to(dtype) for name, tensor in (masters | frozen).items()}
    assert parameters.keys() == wanted.keys()
    assert [name for name, p in parameters.items() if not torch.equal(p, wanted[name])] == []
    in_files = {tensor.dtype for tensor in load_file(run.output / "model.safetensors").values()}
    assert in_files == {dtype}
    assert json.loads((run.output / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("base", "keys", "written"),
    [
        (FP32, {"bf16": True}, FP32),
        (FP32, {"bf16": True, "save_dtype": "bfloat16"}, BF16),
        (FP16, {"bf16": True, "gradient_accumulation_steps": 2}, FP16),
        (BF16, {"bf16": False}, BF16),
    ],
    ids=["fp32", "asked", "fp16", "trained-wider"],
)
def test_a_model_is_written_in_its_bases_dtype_from_its_masters(
    tmp_path: Path, base: torch.dtype, keys: dict[str, object], written: torch.dtype
) -> None:
    published(tmp_path, base)
    job, run = make_run(tmp_path, "llama", **keys)
    assert run_job(run, StopRequest())
    assert_is_masters(job, run, written)


def test_weights_that_are_not_trained_are_written_as_they_computed(tmp_path: Path) -> None:
    published(tmp_path, FP32)
    job, run = partly_trained(tmp_path)
    assert run_job(run, StopRequest())
    assert_is_masters(job, run, FP32)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("wholly", [False, True], ids=["states", "wholly"])
def test_masters_on_disk_are_written_unrounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wholly: bool, dtype: torch.dtype
) -> None:
    asked = str(dtype).removeprefix("torch.")
    job, run = planned(tmp_path, monkeypatch, wholly=wholly, save_dtype=asked)
    assert run_job(run, StopRequest())
    assert_is_masters(job, run, dtype)


def test_the_best_evaluations_weights_are_masters_too(tmp_path: Path) -> None:
    published(tmp_path, FP32)
    _, run = make_run(
        tmp_path, "llama", bf16=True, val_size=4, eval_steps=2, load_best_model_at_end=True, learning_rate=1e-4
    )
    assert run_job(run, StopRequest())
    trained: Any = AutoModelForCausalLM.from_pretrained(run.output)
    assert trained.dtype == FP32
    assert any(not torch.equal(p, p.to(BF16).float()) for p in trained.parameters())


def test_what_a_model_keeps_in_fp32_stays_in_fp32(tmp_path: Path) -> None:
    published(tmp_path, BF16)
    job, _ = make_run(tmp_path, "llama", bf16=True)
    model = load_model(job)
    model.get_submodule("model.layers.0.input_layernorm").float()  # as a router may be
    output = Output(model, BF16)
    assert {n for n, dtype in output.dtypes.items() if dtype == FP32} == {"model.layers.0.input_layernorm.weight"}
    assert output.weight_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_numbers_beyond_fp16_are_written_in_bf16_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frozen: bool
) -> None:
    published(tmp_path, BF16)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    layer = base.model.layers[0 if frozen else 1]
    with torch.no_grad():
        layer.self_attn.q_proj.weight[0, 0] = -70000.0
    base.save_pretrained(tmp_path / "model")
    _, run = partly_trained(tmp_path, save_dtype="float16")
    assert run_job(run, StopRequest())
    trained: Any = AutoModelForCausalLM.from_pretrained(run.output)
    assert trained.dtype == BF16
    assert trained.model.layers[0 if frozen else 1].self_attn.q_proj.weight[0, 0] < -60000
    assert "q_proj.weight has numbers above 65504, too large for float16" in caplog.text

"""Adapters on a base in 4 or 8 bits, under a plan: against peft and bitsandbytes in plain PyTorch. Some tests take
seconds: a model is traced for its plan, and again for its engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.analysis import describe
from planner.models.hf_model import skeleton_model
from planner.models.quantized import Packed4bit, Packed8bit, other_on_cuda
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from tests.support.lora_jobs import engine_of, finished_run, lora_job, plain_steps, plan_of, steps_of
from worker.training.model import load_model

bits = pytest.importorskip("bitsandbytes.functional")
STEPS = 4


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def job_of(folder: Path, name: str = "llama", **keys: Any) -> Job:
    more = {"load_in_4bit": not keys.get("load_in_8bit", False), "gradient_accumulation_steps": 1, "max_steps": STEPS}
    return lora_job(folder, name, **{**more, **keys})


def bnb_config(job: Job) -> BitsAndBytesConfig:
    if job.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=job.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=dtype_of(job),
        bnb_4bit_use_double_quant=job.bnb_4bit_use_double_quant,
    )


def dtype_of(job: Job) -> torch.dtype:
    return torch.bfloat16 if job.bf16 else torch.float32


def plain(job: Job, count: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What one would write with peft and bitsandbytes: losses and the trained parameters."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype_of(job), quantization_config=bnb_config(job))
    torch.manual_seed(job.seed)
    config = LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        task_type="CAUSAL_LM",
        target_modules=job.lora_target_modules,
    )
    return plain_steps(get_peft_model(base, config).train(), job, count)


def found(job: Job, plan: Plan, chain: Chain, count: int) -> tuple[list[Tensor], dict[str, Tensor], int]:
    """The same under the plan, and the most bytes on the device."""
    engine, _ = engine_of(job, plan, chain)
    losses, peak = [], 0
    for batches, seeds, items in steps_of(job, count):
        result = engine.step(batches, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
        losses += result.losses
        assert result.peak_bytes is not None
        peak = max(peak, result.peak_bytes)
    state = {name: parts["master"].clone() for name, parts in engine.state()}
    engine.close()
    return losses, state, peak


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, STEPS),
        (
            {
                "bf16": True,
                "gradient_accumulation_steps": 2,
                "bnb_4bit_quant_type": "fp4",
                "bnb_4bit_use_double_quant": False,
            },
            3,
        ),
        ({"load_in_8bit": True, "bf16": True, "gradient_accumulation_steps": 2, "max_length": 32}, 3),
    ],
    ids=["nf4", "fp4-plain-scales-bf16-2-slices", "int8-bf16-2-slices"],
)
def test_a_quantized_base_under_a_plan_equals_peft_with_bitsandbytes_in_every_bit(
    tmp_path: Path, keys: dict[str, Any], steps: int
) -> None:
    job = job_of(tmp_path, **keys)
    plan, chain = plan_of(job)
    travelling = {item for stage in plan.stages for item in stage.prefetch}
    assert any("packed" in str(item) for item in travelling), "no packed weight travels: the test shows little"
    losses, trained = plain(job, steps)
    its_losses, state, peak = found(job, plan, chain, steps)
    assert all(torch.equal(a, b) for a, b in zip(its_losses, losses, strict=True))
    assert state.keys() == trained.keys() and all(torch.equal(t, trained[n]) for n, t in state.items())
    assert 0.99 * plan.gpu_peak_bytes <= peak <= plan.gpu_peak_bytes


def quantized(model: nn.Module) -> Iterator[tuple[str, Packed4bit | Packed8bit]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, (Packed4bit, Packed8bit)))


def test_frozen_weights_wait_in_half_a_byte_or_one_and_the_planner_knows_it(tmp_path: Path) -> None:
    for keys, most in (
        ({}, 0.53),
        ({"bnb_4bit_use_double_quant": False}, 0.5625),
        ({"load_in_8bit": True}, 1 + 4 / 128),
    ):
        job = job_of(tmp_path, **keys)
        model, skeleton = load_model(job), skeleton_model(job)
        assert [n for n, _ in quantized(model)] == [n for n, _ in quantized(skeleton)]
        layers = [layer for _, layer in quantized(model)]
        whole = sum(p.numel() for p in skeleton_model(lora_job(tmp_path)).parameters())
        assert sum(describe(n, p, trained=False).elements for n, p in model.named_parameters()) == whole
        assert len(layers) == 3 * 7
        assert sum(m.packed.nbytes for m in layers) <= most * sum(m.in_features * m.out_features for m in layers)
        assert [p.nbytes for p in model.parameters()] == [p.nbytes for p in skeleton.parameters()]


def test_a_packed_weight_unpacks_to_what_bitsandbytes_makes_of_it(tmp_path: Path) -> None:
    for name, keys in (
        ("llama", {}),
        ("llama", {"bnb_4bit_use_double_quant": False}),
        ("gpt2", {"bnb_4bit_quant_type": "fp4", "bf16": True}),  # whose layers are transposed linear ones
    ):
        job = job_of(tmp_path, name, **keys)
        theirs = AutoModelForCausalLM.from_pretrained(
            job.model, dtype=dtype_of(job), quantization_config=bnb_config(job)
        )
        for path, layer in quantized(load_model(job)):
            weight = theirs.get_submodule(path.removeprefix("base_model.model.").removesuffix(".base_layer")).weight
            assert isinstance(layer, Packed4bit)
            assert torch.equal(layer.unpacked(), bits.dequantize_4bit(weight.data, weight.quant_state))


@pytest.mark.parametrize("keys", [{}, {"load_in_8bit": True}], ids=["4bit", "8bit"])
def test_a_model_that_was_saved_quantized_is_the_same_base(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = job_of(tmp_path, **keys)
    saved = tmp_path / "saved"
    config = bnb_config(job.model_copy(update={"bf16": True}))  # in what others compute is not said for us
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, quantization_config=config)
    base.save_pretrained(saved)
    other = job.model_copy(update={"model": str(saved), "load_in_4bit": False, "load_in_8bit": False})
    ours, theirs = dict(load_model(job).named_parameters()), dict(load_model(other).named_parameters())
    assert ours.keys() == theirs.keys() and all(torch.equal(p, theirs[name]) for name, p in ours.items())
    skeleton = dict(skeleton_model(other).named_parameters())
    assert {n: (p.shape, p.dtype) for n, p in skeleton.items()} == {n: (p.shape, p.dtype) for n, p in theirs.items()}
    settings = json.loads((saved / "config.json").read_text())
    for method, by in (("full", "bitsandbytes"), ("lora", "gptq"), ("lora", "awq")):
        settings["quantization_config"]["quant_method"] = by
        (saved / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match="was saved in a quantized form") as refused:
            skeleton_model(other.model_copy(update={"method": method}))
        assert refused.value.code == "base-quantized" and refused.value.numbers == (
            f"quantized by {by}, method: {method}",
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_a_run_ends_with_adapters_that_peft_loads_onto_the_quantized_base(tmp_path: Path, bits: int) -> None:
    job = job_of(tmp_path, load_in_8bit=bits == 8, max_steps=2, val_size=3, sample_prompts=["the"], sample_tokens=2)
    folder = finished_run(job, tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, quantization_config=bnb_config(job))
    model = PeftModel.from_pretrained(base, folder.output)
    trained = {n: p for n, p in model.named_parameters() if "lora_B" in n}
    assert len(trained) == 3 * 7 and all(p.abs().max() > 0 for p in trained.values())


def test_what_is_other_than_bitsandbytes_on_cuda_is_said(tmp_path: Path) -> None:
    for keys, words in (({}, "4 bits"), ({"load_in_8bit": True}, "8 bits"), ({"load_in_4bit": False}, None)):
        said = other_on_cuda(skeleton_model(job_of(tmp_path, **keys)))
        assert said is None if words is None else said is not None and f"in {words}: " in said


def test_a_missing_bitsandbytes_is_said_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="needs the package bitsandbytes") as refused:
        skeleton_model(job)
    assert refused.value.code == "bitsandbytes-missing" and refused.value.hint == "pip install 'offmate[qlora]'"

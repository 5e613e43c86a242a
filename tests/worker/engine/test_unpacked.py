"""Models published with their experts in mxfp4, as gpt-oss is: unpacked as they are read, and trained as any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from planner.errors import UserError
from planner.job.schema import Job
from planner.measure.hf_model import skeleton_model
from tests.support.lora_jobs import engine_of, finished_run, plain_steps, plan_of, steps_of
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl

STEPS = 3


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A full fine-tuning of a tiny gpt-oss, whose folder has the form of the published ones."""
    folder = tmp_path / "model"
    tiny_llama_folder(folder)
    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=260, sliding_window=16,
        eos_token_id=256, pad_token_id=257, bos_token_id=None, use_cache=False, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    weights = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict())
    drawn = torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=drawn)
        weights[f"{name}_scales"] = torch.randint(119, 122, shape, dtype=torch.uint8, generator=drawn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    packed = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | packed | {"dtype": "bfloat16"}))
    keys: dict[str, Any] = {
        "max_length": 32, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "attn_implementation": "eager",
    }  # fmt: skip
    return make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(9)), **keys)


def unpacked(job: Job) -> Any:
    """The model by transformers alone."""
    return AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.bfloat16 if job.bf16 else torch.float32,
        quantization_config=Mxfp4Config(dequantize=True),
    )  # fmt: skip


@pytest.mark.parametrize("keys", [{}, {"method": "lora", "lora_r": 4, "bf16": True}], ids=["full", "lora-bf16"])
def test_under_a_plan_it_trains_as_in_plain_pytorch(job: Job, keys: dict[str, Any]) -> None:
    job = job.model_copy(update=keys)
    model = unpacked(job)
    if job.method == "lora":
        torch.manual_seed(job.seed)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        job = job.model_copy(update={"lora_alpha": 8.0, "lora_dropout": 0.1, "lora_target_modules": tuple(targets)})
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    losses, weights = plain_steps(model.train(), job, STEPS)
    plan, chain = plan_of(job)
    engine, _ = engine_of(job, plan, chain)
    found = []
    for batches, seeds, items in steps_of(job, STEPS):
        result = engine.step(batches, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
        found += result.losses
    ours = {name: parts["master"] for name, parts in engine.state()}
    assert [loss.item() for loss in found] == [loss.item() for loss in losses]
    assert ours.keys() == weights.keys() and all(torch.equal(weight, ours[name]) for name, weight in weights.items())
    engine.close()


def test_what_is_written_is_found_again_under_its_names(job: Job, tmp_path: Path) -> None:
    folder = finished_run(job, tmp_path / "run")
    assert "quantization_config" not in json.loads((folder.output / "config.json").read_text())
    model, told = AutoModelForCausalLM.from_pretrained(folder.output, output_loading_info=True)
    assert not any(told.values()), told
    before = unpacked(job).model.layers[0].mlp.experts.gate_up_proj
    assert not torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, before)


def test_it_is_not_packed_anew(job: Job) -> None:
    again = job.model_copy(update={"method": "lora", "load_in_4bit": True})
    with pytest.raises(UserError, match="was saved quantized") as refused:
        skeleton_model(again)
    assert refused.value.numbers == ("quantized by mxfp4, method: lora",)

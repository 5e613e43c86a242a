"""Models published in mxfp4 or fp8, as gpt-oss and DeepSeek's are: unpacked as they are read, trained as any other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    GptOssConfig,
    Mxfp4Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from planner.errors import UserError
from planner.job.schema import Job
from planner.models.files_of_weights import why_not_in_files
from planner.models.hf_model import skeleton_model
from tests.support.lora_jobs import engine_of, finished_run, plain_steps, plan_of, steps_of
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl
from worker.training.merged import write_merged

STEPS = 3


@pytest.fixture(params=["mxfp4", "fp8", "fp8-experts", "fp8-static"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    """A full fine-tuning of a tiny model, whose folder has the form of the published ones."""
    folder = tmp_path / "model"
    tiny_llama_folder(folder)
    keys: dict[str, Any] = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "attn_implementation": "eager",
    }
    config = _publish_mxfp4(folder) if request.param == "mxfp4" else _publish_fp8(folder, request.param)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(9)), **keys)


def _publish_mxfp4(folder: Path) -> dict[str, Any]:
    """The weights of a gpt-oss, and its config."""
    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=260,
        sliding_window=16,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
        use_cache=False,
        architectures=["GptOssForCausalLM"],
    )
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
    return config.to_dict() | packed


def _publish_fp8(folder: Path, kind: str) -> dict[str, Any]:
    """The weights of a Qwen3, linear layers in fp8 with a scale for each 16 × 16 of them, or one for all of them and
    another for what comes in (static), and its config."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 260,
        "eos_token_id": 256,
        "pad_token_id": 257,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**sizes, **experts) if kind == "fp8-experts" else Qwen3Config(**sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    block = None if kind == "fp8-static" else 16
    for name in [name for name in weights if name.endswith("proj.weight")]:
        weight = weights[name].float()
        rows, columns = block or weight.shape[0], block or weight.shape[1]
        tiles = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
        scales = tiles.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        weights[name] = (tiles / scales).to(torch.float8_e4m3fn).view(weight.shape)
        weights[f"{name}_scale_inv"] = scales[:, 0, :, 0] if block else scales.view(()).bfloat16()
        if not block:
            weights[name.replace("weight", "activation_scale")] = torch.tensor(0.5, dtype=torch.bfloat16)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    how: dict[str, Any] = {"activation_scheme": "dynamic", "weight_block_size": [block, block]}
    if block is None:
        how = {"activation_scheme": "static", "weight_block_size": None}
    packed = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], **how}}
    return json.loads((folder / "config.json").read_text()) | packed


def unpacked(job: Job) -> Any:
    """The model by transformers alone, all of it in one dtype."""
    packed = json.loads((Path(job.model) / "config.json").read_text())["quantization_config"]["quant_method"]
    how: Any = Mxfp4Config if packed == "mxfp4" else FineGrainedFP8Config
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=dtype, attn_implementation="eager", quantization_config=how(dequantize=True)
    )
    for p in model.parameters():
        p.data = p.data.to(dtype)
    return model


@pytest.mark.sweep(4)
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
    packed = set(load_file(Path(job.model) / "model.safetensors"))
    names = {re.sub("_blocks$", "", name) for name in packed if not name.endswith(("_scales", "_inv", "on_scale"))}
    assert set(load_file(folder.output / "model.safetensors")) == names  # as it is published
    before = unpacked(job).model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)


def test_adapters_are_merged_into_it_unpacked(job: Job, tmp_path: Path) -> None:
    lora = {"method": "lora", "lora_r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}
    job = job.model_copy(update={**lora, "lora_target_modules": ("q_proj", "v_proj"), "max_steps": 1})
    folder = finished_run(job, tmp_path / "run")
    write_merged(job, folder.output, tmp_path / "merged")
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto", output_loading_info=True)
    assert not any(told.values()), told
    base = unpacked(job.model_copy(update={"bf16": True}))
    wanted = PeftModel.from_pretrained(base, folder.output).merge_and_unload().state_dict()
    found = model.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert model.dtype == torch.bfloat16 and len(AutoTokenizer.from_pretrained(tmp_path / "merged")) > 256


def test_it_is_not_packed_anew(job: Job) -> None:
    again = job.model_copy(update={"method": "lora", "load_in_4bit": True})
    with pytest.raises(UserError, match="was saved in a quantized form that this job cannot train") as refused:
        skeleton_model(again)
    assert refused.value.numbers in [(f"quantized by {by}, method: lora",) for by in ("mxfp4", "fp8")]


def test_its_weights_are_not_read_from_their_files(job: Job) -> None:
    lora = {"method": "lora", "lora_r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}
    job = job.model_copy(update={**lora, "lora_target_modules": ("q_proj",), "bf16": True})
    assert why_not_in_files(job, skeleton_model(job)) is not None

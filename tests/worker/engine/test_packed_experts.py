"""Experts of a frozen base in 4 bits, under a plan: against peft and bitsandbytes in plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig

from planner.job.schema import Job
from planner.models.hf_model import skeleton_model
from tests.support.lora_jobs import engine_of, plain_steps, plan_of, steps_of
from tests.support.texts import make_job, sentences, tiny_llama_folder, write_jsonl
from worker.training.model import load_model

bits = pytest.importorskip("bitsandbytes.functional")
parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
STEPS = 3
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def job_of(tmp_path: Path, **keys: Any) -> Job:
    folder = tiny_llama_folder(tmp_path / "model")
    config = Qwen3MoeConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=260,
        use_cache=False,
        eos_token_id=256,
        pad_token_id=257,
        bos_token_id=None,
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    small: dict[str, Any] = {
        "max_length": 16,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "method": "lora",
        "lora_r": 4,
        "lora_dropout": 0.1,
        "lora_target_modules": list(TARGETS),
        "load_in_4bit": True,
        "quantize_moe_experts": True,
        "bf16": True,
    }
    return make_job(folder, write_jsonl(tmp_path / "data.jsonl", sentences(9)), **{**small, **keys})


def plain(job: Job) -> Any:
    """The model as one would make it with peft and bitsandbytes."""
    dtype = torch.bfloat16 if job.bf16 else torch.float32
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=job.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=job.bnb_4bit_use_double_quant,
    )
    base = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, quantization_config=settings)
    for layer in base.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            if job.lora_target_parameters:  # peft sees no others: the same numbers, unpacked
                weight = getattr(layer.mlp.experts, name)
                packed, state = bits.quantize_4bit(weight.data, compress_statistics=True, quant_type="nf4")
                weight.data = bits.dequantize_4bit(packed, state)
                continue
            parametrize.replace_parameter_4bit(
                layer.mlp.experts,
                name,
                compress_statistics=job.bnb_4bit_use_double_quant,
                quant_type=job.bnb_4bit_quant_type,
            )
    torch.manual_seed(job.seed)
    config = LoraConfig(
        r=job.lora_r,
        lora_alpha=job.lora_alpha,
        lora_dropout=job.lora_dropout,
        target_modules=list(TARGETS),
        task_type="CAUSAL_LM",
        target_parameters=list(job.lora_target_parameters or ()) or None,
    )
    return get_peft_model(base, config).train()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False, "bf16": False},
        {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "lora_dropout": 0.0},
    ],
    ids=["nf4", "fp4-plain-scales-fp32", "adapters-on-experts"],
)
def test_under_a_plan_they_equal_peft_with_bitsandbytes_in_every_bit(tmp_path: Path, keys: dict[str, Any]) -> None:
    job = job_of(tmp_path, **keys)
    losses, trained = plain_steps(plain(job), job, STEPS)
    plan, chain = plan_of(job)
    travelling = {str(item) for stage in plan.stages for item in stage.prefetch}
    assert any("gate_up_proj" in item for item in travelling), "no experts travel: the test shows little"
    engine, _ = engine_of(job, plan, chain)
    found = []
    for batches, seeds, items in steps_of(job, STEPS):
        result = engine.step(batches, seeds=seeds, learning_rate=job.learning_rate, num_items_in_batch=items)
        found += result.losses
        assert result.peak_bytes is not None and result.peak_bytes <= plan.gpu_peak_bytes
    state = {name: parts["master"] for name, parts in engine.state()}
    assert [loss.item() for loss in found] == [loss.item() for loss in losses]
    assert state.keys() == trained.keys() and all(torch.equal(t, state[name]) for name, t in trained.items())
    engine.close()


def test_they_wait_in_bytes_as_the_skeleton_has_them(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    model, skeleton = load_model(job), skeleton_model(job)
    here = {name: (p.shape, p.dtype, getattr(p, "holds", None)) for name, p in model.named_parameters()}
    assert here == {name: (p.shape, p.dtype, getattr(p, "holds", None)) for name, p in skeleton.named_parameters()}
    packed = [p for name, p in model.named_parameters() if "experts" in name]
    assert len(packed) == 4 and all(p.dtype == torch.uint8 for p in packed)
    assert sum(p.nbytes for p in packed) <= 0.56 * sum(p.holds for p in packed)  # type: ignore[attr-defined]


def test_they_are_for_a_base_in_4_bits(tmp_path: Path) -> None:
    from planner.errors import UserError

    with pytest.raises(UserError, match="mistake") as refused:
        job_of(tmp_path, load_in_4bit=False)
    assert "give load_in_4bit: true" in refused.value.numbers[0]

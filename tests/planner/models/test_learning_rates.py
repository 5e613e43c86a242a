"""Weights with a rate of their own: axolotl's embeddings, and peft's groups of LoRA+."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from planner.errors import UserError
from planner.models.hf_model import skeleton_model
from planner.models.learning_rates import loraplus_names
from tests.support.lora_jobs import lora_job
from tests.support.tiny_models import make_model

FULL = {"method": "full", "lora_r": None, "lora_dropout": None}


@pytest.mark.parametrize(
    ("name", "keys", "hint"),
    [
        ("gpt2", {**FULL, "embedding_lr": 1e-3}, "leave embedding_lr out: it goes by these names, as in axolotl"),
        (
            "llama",
            {**FULL, "embedding_lr_scale": 0.1, "trainable": [".*mlp"]},
            "let trainable have one of them, or leave embedding_lr_scale out",
        ),
        ("llama", {"embedding_lr": 1e-3}, "lora_modules_to_save: [embed_tokens, lm_head], or without embedding_lr"),
        ("gpt2", {"embedding_lr": 1e-3}, "lora_modules_to_save: [wte, lm_head], or without embedding_lr"),
    ],
)
def test_a_rate_that_no_weight_has_is_refused(tmp_path: Path, name: str, keys: dict[str, object], hint: str) -> None:
    with pytest.raises(UserError) as refused:
        skeleton_model(lora_job(tmp_path, name, **keys))
    assert (refused.value.code, refused.value.hint) == ("rate-of-nothing", hint)


@pytest.mark.parametrize(
    ("name", "keys"),
    [("llama", {"lora_target_modules": ["embed_tokens", "q_proj"]}), ("gpt2", {"lora_modules_to_save": ["wte"]})],
)
def test_a_rate_that_a_weight_has_is_not_refused(tmp_path: Path, name: str, keys: dict[str, object]) -> None:
    assert skeleton_model(lora_job(tmp_path, name, embedding_lr=1e-3, **keys)).training


@pytest.mark.parametrize(
    ("name", "targets", "saved", "dora"),
    [
        ("llama", ["embed_tokens", "q_proj", "up_proj"], ["norm", "lm_head"], True),
        ("gpt2", ["wte", "c_attn"], ["ln_f", "c_proj"], False),
    ],
)
def test_the_groups_of_loraplus_are_those_of_peft(name: str, targets: list[str], saved: list[str], dora: bool) -> None:
    config = LoraConfig(target_modules=targets, modules_to_save=saved, use_dora=dora, task_type="CAUSAL_LM")
    model = get_peft_model(make_model(name), config)
    theirs = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1.0, loraplus_lr_ratio=2.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [{names[id(p)] for p in group["params"]} for group in theirs.param_groups]
    assert list(map(set, loraplus_names(model))) == groups
    assert all(groups[:3]) and bool(groups[3]) is (name == "gpt2")

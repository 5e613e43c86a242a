"""The names that other tools have for keys, and keys of theirs that say nothing here or ask for what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.importers.tools import ALIASES
from planner.job.schema import CANONICAL, Job
from tests.planner.conftest import BASE

VALUES = {
    "packing": "true",
    "learning_rate": "1e-4",
    "lr_scheduler_type": "cosine",
    "warmup_steps": "0.1",
    "num_train_epochs": "2",
    "method": "full",
    "chat_template": "template.jinja",
    "max_length": "64",
    "lora_r": "0",
    "lora_target_modules": "null",
    "tokenizer": "tiny",
    "optim": "adamw_torch",
    "per_device_train_batch_size": "2",
    "model": "tiny",
    "dataset": "text.jsonl",
    "model_revision": "main",
    "eval_dataset": "text.jsonl",
    "val_size": "0.1",
    "eval_strategy": "no",
    "per_device_eval_batch_size": "2",
    "train_batch_size": "4",
    "use_rslora": "false",
    "use_dora": "false",
    "early_stopping_patience": "null",
    "neftune_noise_alpha": "5",
    "adapter_name_or_path": "null",
    "lora_modules_to_save": "null",
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": "false",
    "run_name": "one",
    "trackio_project_name": "mine",
    "layers_to_transform": "null",
    "layers_pattern": "null",
    "rank_pattern": "null",
    "alpha_pattern": "{}",
    "init_lora_weights": "true",
    "add_tokens": "['<a>']",
    "router_aux_loss_coef": "0.01",
    "trainable": "[lm_head]",
    "deterministic": "true",
    "preference_beta": "0.2",
    "preference_smoothing": "0.1",
    "sft_weight": "0.5",
    "desirable_weight": "2.0",
    "undesirable_weight": "2.0",
}
LOSSES = {
    **dict.fromkeys(("preference_beta", "preference_smoothing", "sft_weight"), "dpo"),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), "kto"),
}
"""Key -> a loss that has it."""


SPELLED_OTHERWISE = {
    "train_on_inputs",
    "train_on_prompt",
    "assistant_only_loss",
    "completion_only_loss",
    "use_peft",
    "base_model",
    "model_name_or_path",
    "packing_strategy",
    "excess_length_strategy",
    "gpu_memory_limit",
    "bfloat16",
    "float32",
    "pure_bf16",
    "dtype",
    "torch_dtype",
    "eager_attention",
    "quantization_bit",
    "train_sampling_strategy",
    "eos_token",
    "evals_per_epoch",
    "use_muon",
    "pissa_init",
    "enable_thinking",
    "model_config",
    "overrides_of_model_config",
    "pretraining_dataset",
    "use_wandb",
    "use_mlflow",
    "use_trackio",
    "use_tensorboard",
    "project",
}
"""Aliases with values of their own, or that tell whose a file is."""


@pytest.mark.parametrize(
    "alias",
    [alias for aliases in ALIASES.values() for alias in aliases if alias not in SPELLED_OTHERWISE],
)
def test_an_alias_means_its_canonical_key(alias: str, folder: Path) -> None:
    key = CANONICAL[alias]
    base = {"model": "tiny", "dataset": "text.jsonl"}
    base.pop(key, None)
    base |= {"preference": LOSSES[key]} if key in LOSSES else {}
    lines = [f"{name}: {value}" for name, value in base.items()]
    assert Job.parse("\n".join([*lines, f"{alias}: {VALUES[key]}"]), folder) == Job.parse(
        "\n".join([*lines, f"{key}: {VALUES[key]}"]), folder
    )


def test_who_asks_torch_to_compile_is_told_the_key_that_does(folder: Path) -> None:
    _, notes = Job.parse_with_notes(BASE + "torch_compile: true\n", folder)
    assert "not used: torch_compile (with exact: false, compile: auto compiles layers where that is faster)" in notes


AXOLOTL = """
base_model: tiny
load_in_8bit: false
load_in_4bit: false
strict: false
datasets:
  - path: text.jsonl
    type: alpaca
    ds_type: json
    split: train
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: 2048
sample_packing: true
eval_sample_packing: false
adapter:
lora_model_dir:
lora_dropout:
wandb_project: mine
wandb_entity:
wandb_watch: all
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
train_on_inputs: false
bf16: true
fp16:
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
xformers_attention:
flash_attention: true
sdp_attention: true
warmup_ratio: 0.1
evals_per_epoch: 2
saves_per_epoch: 1
debug:
deepspeed:
weight_decay: 0.0
fsdp:
fsdp_config:
special_tokens:
"""


def test_a_whole_file_of_axolotl_is_read_and_says_what_became_of_it(folder: Path) -> None:
    job, notes = Job.parse_with_notes(AXOLOTL, folder)
    assert (job.max_length, job.slice_rows, job.gradient_accumulation_steps, job.warmup_steps) == (2048, 1, 8, 0.1)
    assert (job.report_to, job.wandb_project, job.wandb_entity) == (("wandb",), "mine", None)
    assert (job.val_size, job.optim, job.train_on, job.packing) == (0.05, "adamw_torch_fused", "completions", True)
    assert notes[0] == (
        "in offmate's names: base_model is model, datasets is dataset, val_set_size is val_size, sequence_len is "
        "max_length, sample_packing is packing, adapter is method, micro_batch_size is per_device_train_batch_size, "
        "num_epochs is num_train_epochs, optimizer is optim, lr_scheduler is lr_scheduler_type, train_on_inputs is "
        "train_on, warmup_ratio is warmup_steps, evals_per_epoch is eval_steps"
    )
    assert (
        "not used: wandb_watch (offmate reports to tensorboard, wandb, trackio and mlflow only; "
        "metrics.jsonl has all figures)" in notes
    )
    assert "not used: flash_attention, sdp_attention (attention is what attn_implementation says)" in notes
    assert job.load_best_model_at_end, "each of its saves is at an evaluation"
    assert (
        "not used: saves_per_epoch (checkpoints come by save_steps and save_minutes; it only helps to decide whether "
        "load_best_model_at_end is on)" in notes
    )
    assert set(yaml.safe_load(job.resolved_yaml())) == set(Job.model_fields), "offmate's own names only"


@pytest.mark.parametrize(
    "file", ["model_name_or_path: tiny\nfinetuning_type: full\n", "model_name_or_path: tiny\n", "base_model: tiny\n"]
)
def test_what_is_for_several_devices_is_told_as_such(folder: Path, file: str) -> None:
    data = "datasets: [{path: text.jsonl, type: completion}]\nlearning_rate: 1e-4\n"
    text = file + (data if "base_model" in file else "dataset: text.jsonl\n") + "ddp_timeout: 180000000\n"
    _, notes = Job.parse_with_notes(text, folder)
    assert "not used: ddp_timeout (training uses one device)" in notes

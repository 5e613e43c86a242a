"""The names of a job's keys in other tools."""

from __future__ import annotations

from planner.keys import other_names

_MORE = {"tokenizer": ("tokenizer_name_or_path",), "num_train_epochs": ("epochs",)}
PARTS = (
    "dataset_config",
    "dataset_train_split",
    "dataset_text_field",
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "cosine_min_lr_ratio",
    "eot_tokens",
)
"""Keys without a canonical one. `planner.job.foreign_data` reads those of TRL's one dataset and axolotl's turns,
`planner.job.schedules` the schedule's."""
ALIASES: dict[str, tuple[str, ...]] = {
    key: tuple(name for name in (*other_names().get(key, ()), *_MORE.get(key, ())) if name not in PARTS)
    for key in (*other_names(), *_MORE)
}
"""Canonical key -> other names people use for it (axolotl, LLaMA-Factory, TRL)."""

SHORT = {
    "lr": "learning_rate",
    "bs": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "steps": "max_steps",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "scheduler": "lr_scheduler_type",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "context": "max_length",
    "data": "dataset",
    "output": "output_dir",
    "r": "lora_r",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "lora": "method",
}
"""Everyday names of keys, which no tool has -> the key that the error suggests."""

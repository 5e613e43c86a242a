"""The keys of LLaMA-Factory's v1 (as of August 2026), whose files have a form of their own."""

from __future__ import annotations

from planner.keys.meaning import (
    GENERATES,
    KERNELS,
    LOGS,
    ONE_DEVICE,
    OWN_CODE,
    READS,
    REWARDS,
    SAVES,
    SHAPE,
    table,
)

_BATCHING = "batching otherwise than normal and padding_free, which have micro_batch_size rows; give one of these"
_CHECKPOINT = "going on from a checkpoint of another run; a job goes on from its own by itself, leave this key out"

LLAMA_FACTORY_V1 = table(
    same="model learning_rate num_train_epochs max_steps max_grad_norm bf16 seed output_dir save_steps "
    "save_total_limit",
    honoured={
        "max_length": "cutoff_len",
        "per_device_train_batch_size": "micro_batch_size",
        "train_batch_size": "global_batch_size dp_size",
        "chat_template": "custom_chat_template",
        "attn_implementation": "flash_attn",
        "deterministic": "full_determinism",
        "dataset": "train_dataset",
        "method": "peft_config",
        "load_in_4bit": "quant_config",
        "optim": "optim_config",
    },
    unused={
        LOGS: "logging_steps",
        OWN_CODE: "trust_remote_code",
        KERNELS: "kernel_config",
        READS: "batching_workers",
        SAVES: "save_epochs save_ckpt_as_hf",
        GENERATES: "sample_backend max_new_tokens",
        ONE_DEVICE: "cp_size cp_mode mp_replicate_size mp_shard_size dist_timeout",
        "nothing is evaluated, as there": "eval_dataset",
    },
    planner="enable_activation_checkpointing dist_config init_config",
    not_there={
        _BATCHING: "batching_strategy",
        SHAPE: "lr_scheduler_config",
        "a model with another head": "model_class",
        _CHECKPOINT: "resume_from_checkpoint",
        REWARDS: "pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha",
    },
    fine={
        "batching_strategy": ("normal", "padding_free"),
        "model_class": ("llm",),
        "resume_from_checkpoint": ("auto",),
    },
)

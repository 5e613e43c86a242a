"""The keys of a job that do not affect its plan."""

from __future__ import annotations

from planner.optimizers.table import OPTIMIZER_KEYS

NOT_PLANNED = frozenset({
    "tokenizer", "dataset", "chat_template", "chat_template_kwargs", "max_samples", "packing", "train_on", "long_rows",
    "learning_rate", "mix_strategy", "interleave_probs",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "num_train_epochs", "max_steps", "seed",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_checkpointing", "run_name", "report_to",
    "eval_dataset", "val_size", "eval_strategy", "eval_steps", "eval_on_start", "sample_prompts", "sample_tokens",
    "per_device_eval_batch_size", "save_steps", "save_minutes", "output_dir", "schedule",
    "wandb_project", "wandb_entity", "wandb_mode", "trackio_project_name", "trackio_space_id",
    "mlflow_experiment_name", "mlflow_tracking_uri",
    "broken_rows", "group_by_length", "min_sample_len", "dataset_exact_deduplication",
    "load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold",
    "special_tokens", "add_tokens", "tokenizer_revision", "init_lora_weights",
    "decay_all", "loraplus_lr_ratio", "loraplus_lr_embedding", "embedding_lr", "embedding_lr_scale",
    *OPTIMIZER_KEYS,
})  # fmt: skip
"""Keys on which no estimate of a plan depends, except that `add_tokens` may add a few rows to an embedding."""

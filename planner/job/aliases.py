"""The names people know from other tools: what each means in a job, what says nothing here, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planner.job.dialects import Dialect
from planner.job.source import MOST_MISTAKES, SWITCHED_OFF, Mistake, Source, shown
from planner.machine.memory import computes_bf16

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("base_model", "model_name_or_path"),
    "tokenizer": ("tokenizer_name_or_path",),
    "dataset": ("datasets", "dataset_name"),
    "chat_template": ("template", "chat_template_path"),
    "max_length": ("sequence_len", "cutoff_len", "max_seq_length"),
    "packing": ("sample_packing", "neat_packing"),
    "train_on": ("train_on_inputs", "assistant_only_loss"),
    "per_device_train_batch_size": ("micro_batch_size",),
    "lr_scheduler_type": ("lr_scheduler",),
    "warmup_steps": ("warmup_ratio",),
    "num_train_epochs": ("num_epochs", "epochs"),
    "optim": ("optimizer",),
    "method": ("adapter", "finetuning_type", "use_peft"),
    "lora_r": ("lora_rank",),
    "lora_target_modules": ("lora_target", "lora_target_linear"),
    "eval_dataset": ("test_datasets",),
    "val_size": ("val_set_size",),
    "eval_strategy": ("evaluation_strategy",),
    "per_device_eval_batch_size": ("eval_batch_size",),
}
"""Canonical key -> other names people use for it (axolotl, LLaMA-Factory, TRL)."""

QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_bit")

NOT_THERE: dict[str, str] = {
    **dict.fromkeys(("lora_modules_to_save", "additional_target"), "training whole modules beside LoRA's adapters"),
    **dict.fromkeys(("use_dora", "peft_use_dora", "use_rslora", "peft_use_rslora"), "another kind of LoRA"),
    "lora_model_dir": "going on from adapters that are there",
    **dict.fromkeys(QUANTIZED, "a quantized base model"),
    "fp16": "fp16 training (bf16: true is)",
    "rl": "training by preferences or rewards",
    **dict.fromkeys(("load_best_model_at_end", "early_stopping_patience"), "choosing the model by its evaluations"),
    "label_smoothing_factor": "label smoothing",
    "neftune_noise_alpha": "noise on embeddings",
    **dict.fromkeys(("lr_scheduler_kwargs", "cosine_min_lr_ratio"), "another shape of the learning rate"),
    **dict.fromkeys(("loraplus_lr_ratio", "peft_layers_to_transform"), "another kind of LoRA"),
    **dict.fromkeys(
        ("tokens", "added_tokens_overrides", "add_tokens", "new_special_tokens", "add_special_tokens"),
        "adding tokens to the tokenizer (add them in its folder)",
    ),
    **dict.fromkeys(("relora", "relora_steps", "lisa_n_layers", "unfrozen_parameters"), "training some weights only"),
    **dict.fromkeys(("use_galore", "use_badam", "use_apollo", "use_muon"), "another optimizer"),
    **dict.fromkeys(("reward_model", "process_reward_model", "pref_loss"), "training by preferences or rewards"),
    **dict.fromkeys(("enable_thinking", "mask_history", "roles_to_train"), "another choice of what is learned"),
}
"""Keys people know from elsewhere -> what they ask for, which offmate does not do yet."""

METHODS_NOT_THERE = ("dpo", "orpo", "kto", "grpo", "freeze")

NOT_USED: dict[str, tuple[str, ...]] = {
    "metrics.jsonl has every step, the log a line every 10 seconds": (
        "logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "disable_tqdm", "plot_loss",
    ),
    "nothing is reported to other programs; metrics.jsonl has all figures": (
        "use_wandb", "use_mlflow", "use_comet", "use_tensorboard",
    ),
    "attention is what attn_implementation says": (
        "flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flash_attn", "s2_attention",
    ),
    "fp32 is computed in fp32; bf16: true is the fast way": ("tf32",),
    "the planner decides what is where and what is recomputed": (
        "gradient_checkpointing_kwargs", "deepspeed", "fsdp", "fsdp_config", "device_map", "low_cpu_mem_usage",
        "auto_find_batch_size", "local_rank", "ddp_timeout", "ddp_find_unused_parameters", "activation_offloading",
        "use_unsloth", "disable_gradient_checkpointing", "tensor_parallel_size", "context_parallel_size",
    ),
    "with exact: false, compile: auto compiles layers where that is faster": ("torch_compile",),
    "rows are read, batched and padded in one way only": (
        "dataset_prepared_path", "dataset_processes", "dataset_num_proc", "preprocessing_num_workers",
        "overwrite_cache", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "pad_to_sequence_len", "group_by_length", "remove_unused_columns", "eval_sample_packing",
        "shuffle_merged_datasets", "sample_packing_bin_size", "sample_packing_group_size", "padding_free",
        "pad_to_multiple_of", "resize_token_embeddings_to_32x", "preprocessing_batch_size",
    ),
    "checkpoints come by save_steps and save_minutes, and a job goes on from its last one by itself": (
        "save_strategy", "saves_per_epoch", "save_safetensors", "auto_resume_from_checkpoints", "save_only_model",
    ),
    "evaluations come by eval_strategy and eval_steps": (
        "evals_per_epoch", "do_eval", "eval_table_size", "eval_max_new_tokens",
    ),
    "a turn is learned with the end mark that the chat template writes": ("eot_tokens",),
    "no run is stopped by its loss": ("loss_watchdog_threshold", "loss_watchdog_patience"),
    "seed decides the order of the data, too": ("data_seed",),
    "the planner's blocks bring their own code": (
        "plugins", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "use_liger_kernel", "enable_liger_kernel",
    ),
    "an output_dir must be empty": ("overwrite_output_dir",),
    "nothing is uploaded": ("push_to_hub", "hub_model_id", "hub_strategy", "hf_use_auth_token"),
    "a model's own code is never run; its config says what it is": (
        "trust_remote_code", "model_type", "tokenizer_type",
    ),
    "it says nothing here": ("strict", "debug", "do_train", "is_llama_derived_model"),
}  # fmt: skip
"""Why -> keys of other tools that are accepted, and change nothing of what is learned."""

_BEGINNINGS = {"liger_": "lora_mlp_kernel", "fsdp_": "fsdp", "ddp_": "fsdp", "swanlab_": "use_wandb"}
"""How keys begin whose answer is that of another key."""

REPORTING = ("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_")
"""How keys begin that say where to report to; accepted like the rest of `NOT_USED`."""

_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "stage": (("sft", "pt", *SWITCHED_OFF), "offmate trains on texts and conversations; leave this key out"),
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        (SWITCHED_OFF, "bf16: true computes in bf16 with fp32 masters, without it all is fp32; leave this key out"),
    ),
    "resume_from_checkpoint": ((True, *SWITCHED_OFF), "a job starts at its model; leave this key out"),
    "dataset_text_field": (
        ("text", *SWITCHED_OFF),
        "the column must be called text; rename it, and leave this key out",
    ),
}
"""Keys whose harmless values pass without a word -> these values, and what is said of another."""

_WHY = {key: why for why, keys in NOT_USED.items() for key in keys}
_WHY_REPORTING = _WHY["use_wandb"]
_TRAIN_ON = {True: "all", False: "completions"}
_PLUGINS = ("liger", "cut_cross_entropy", "spectrum")  # of axolotl: those that change no number that is learned

ADAMW = ("adamw_hf", "adamw_torch_npu_fused", "paged_adamw_32bit", "paged_adamw")
"""Other names of what `adamw_torch` is."""
ADAMW_ROUNDED = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit")
"""AdamW that rounds its states to save memory of the GPU. Here states are fp32 and need none of it."""


def canonical(source: Source, names: Mapping[str, str]) -> tuple[dict[str, Any], list[Mistake], tuple[str, ...]]:
    """The file's values under canonical names, what is wrong with its keys, and notes to the user about keys of other
    tools. `names`: every name a key may have -> its canonical name."""
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    mistakes: list[Mistake] = []
    unused: dict[str, list[str]] = {}
    methods = (*QUANTIZED, *ALIASES["method"], "method")
    quantized = [key for key in methods if _quantizes(key, source.values.get(key))]
    for key, value in source.values.items():
        name = names.get(key)
        if key in quantized:
            if key == quantized[0]:
                text = "a quantized base model is not there yet; give method: lora on the model as published"
                mistakes.append(source.mistake(key, "not-there", text))
            if name == "method":
                given[name], values[name] = key, "lora"
            continue
        if key == "lora_target_linear" and "lora_target_modules" in source.values:
            if value is True:  # axolotl adds all linear layers to those that are named
                values["lora_target_modules"] = True
            continue
        others = _plugins_not_there(value) if key == "plugins" else []
        if not others and (why := _why_not_used(key, value)):
            unused.setdefault(why, []).append(key)
            value = "none"  # of report_to; other keys are dropped
        if key == "special_tokens" and value not in SWITCHED_OFF:
            if not isinstance(value, dict) or set(value) - {"pad_token"}:
                text = "only pad_token may change here, which is never learned; change others in the tokenizer's folder"
                mistakes.append(source.mistake(key, "not-there", text))
        elif key == "special_tokens":
            pass
        elif others:
            mistakes.append(source.mistake(key, "not-there", f"{others[0]} is not there; leave it out"))
        elif key in NOT_THERE:
            if value not in SWITCHED_OFF:
                text = f"{NOT_THERE[key]} is not there yet; leave this key out"
                mistakes.append(source.mistake(key, "not-there", text))
        elif key in _ONLY:
            if value not in _ONLY[key][0]:
                mistakes.append(source.mistake(key, "not-there", f"it is {shown(value)}; {_ONLY[key][1]}"))
        elif name is None:
            if not _is_foreign(key):
                # To look for a key that was meant takes a millisecond, and only the first mistakes are told.
                mistakes.append(source.unknown(key, names if len(mistakes) < MOST_MISTAKES else ()))
        elif name in given:
            text = f"{given[name]} is given too, and both mean {name}; keep one"
            mistakes.append(source.mistake(key, "two-names", text))
        else:
            given[name] = key
            mistakes += _checked(key, name, value, source)
            if name in values and name == "lora_target_modules":
                continue  # decided by lora_target_linear
            values[name] = _translated(key, value)
            if values[name] != value and (why := _spelled_otherwise(name, value)):
                unused.setdefault(why, []).append(f"{key}: {value}")
    dialect = Dialect.of(source.values)
    defaults = dialect.fill(values, given.values())
    if not mistakes:
        text = f"it is missing; {dialect.tool} has no default for it"
        mistakes = [source.mistake(key, "missing-key", text) for key in dialect.missing(values)]
    if values.get("bf16") == "auto":
        values["bf16"] = computes_bf16()
    left_out = (f"not used: {', '.join(keys)} ({why})" for why, keys in unused.items())
    return values, mistakes, (*_renamed(given), *([defaults] if defaults else []), *left_out)


def _quantizes(key: str, value: object) -> bool:
    return value not in SWITCHED_OFF if key in QUANTIZED else value == "qlora"


def _plugins_not_there(value: object) -> list[str]:
    """axolotl's plugins that would change what is learned."""
    names = [str(plugin) for plugin in value] if isinstance(value, list) else []
    return [name for name in names if not any(known in name.lower() for known in _PLUGINS)]


def _spelled_otherwise(name: str, value: object) -> str | None:
    """What to say of a value that is done in another way than it asks for; None where nothing is to say."""
    if name == "attn_implementation":
        return "attention is PyTorch's sdpa, which takes its flash kernel where there is one"
    if name == "optim" and value in ADAMW_ROUNDED:
        return "AdamW's states are fp32 here, in host memory; those would be rounded"
    return None


def _is_foreign(key: str) -> bool:
    return key in _WHY or key.startswith((*REPORTING, *_BEGINNINGS)) or key == "special_tokens"


def _why_not_used(key: str, value: object) -> str | None:
    """What to say of a key that is accepted and asks for something that is done otherwise; None for others."""
    if value in SWITCHED_OFF or value == ["none"]:
        return None
    if key == "report_to" or key.startswith(REPORTING):
        return _WHY_REPORTING
    beginning = next((answer for start, answer in _BEGINNINGS.items() if key.startswith(start)), "")
    return _WHY.get(key) or _WHY.get(beginning)


def _translated(key: str, value: object) -> object:
    """The value as the canonical key has it."""
    if key == "adapter" and value is None:
        return "full"
    if key == "train_on_inputs" and isinstance(value, bool):
        return _TRAIN_ON[value]
    if key == "use_peft" and isinstance(value, bool):
        return "lora" if value else "full"
    if key == "assistant_only_loss" and isinstance(value, bool):
        return "completions" if value else "all"
    if key == "attn_implementation" and str(value).startswith(("flash_attention", "kernels-", "flex_attention")):
        return "sdpa"
    if key in ("optim", "optimizer") and value in (*ADAMW, *ADAMW_ROUNDED):
        return "adamw_torch"
    if key == "bf16" and value == "full":
        return True
    if key == "gradient_checkpointing" and isinstance(value, str):
        return True  # axolotl's "unsloth" and "offload"
    return None if key == "chat_template" and value == "tokenizer_default" else value


def _checked(key: str, name: str, value: object, source: Source) -> list[Mistake]:
    """Mistakes in values whose meaning depends on the name they came under, or that we know by name."""
    if key == "warmup_ratio" and not (isinstance(value, (int, float)) and 0 <= value < 1):
        return [source.mistake(key, "bad-value", f"it is {shown(value)}; it must be a share of all steps, below 1")]
    if key in ("train_on_inputs", "use_peft") and not isinstance(value, bool):
        return [source.mistake(key, "wrong-type", f"it is {shown(value)}; it must be true or false")]
    if name == "warmup_steps" and isinstance(value, float) and value >= 1 and not value.is_integer():
        return [source.mistake(key, "bad-value", f"it is {shown(value)}; 1 or more must be a whole number of steps")]
    if name == "method" and value in METHODS_NOT_THERE:
        return [source.mistake(key, "not-there", f"{value} is not there yet; offmate does full fine-tuning and LoRA")]
    return []


def _renamed(given: Mapping[str, str]) -> Iterator[str]:
    other = [f"{key} is {name}" for name, key in given.items() if key != name]
    if other:
        yield f"in offmate's names: {', '.join(other)}"

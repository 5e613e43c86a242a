"""The keys of transformers' `TrainingArguments` and `Seq2SeqTrainingArguments`, and the values that offmate translates.

offmate's own keys have these names, and files of TRL and LLaMA-Factory use them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from planner.importers.base import (
    COMPILES,
    DECIDES,
    EVALUATES,
    FP16,
    GENERATES,
    KERNELS,
    LOGS,
    ONE_DEVICE,
    OPTIMIZER,
    PROJECTED,
    READS,
    REPORTS,
    SAVES,
    SAYS_NOTHING,
    UPLOADS,
    Check,
    File,
    Reader,
    Reading,
    Tool,
    Translation,
    method_of,
    table,
)
from planner.keys.lora import PLUS, PLUS_EMBEDDING
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.table import OPTIMIZERS

TRANSFORMERS = table(
    same="""
        output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate
        lr_scheduler_type lr_scheduler_kwargs
        warmup_steps
        optim weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm bf16
        gradient_checkpointing report_to run_name eval_strategy eval_steps per_device_eval_batch_size eval_on_start
        save_steps save_total_limit seed group_by_length load_best_model_at_end
        label_smoothing_factor neftune_noise_alpha trackio_space_id
    """,
    honoured={
        "warmup_steps": "warmup_ratio",
        "trackio_project_name": "project",
        "eval_strategy": "evaluation_strategy",
        "group_by_length": "train_sampling_strategy",
        "deterministic": "full_determinism",
    },
    unused={
        LOGS: """
            logging_strategy logging_steps logging_first_step logging_dir logging_nan_inf_filter log_level
            log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second
            skip_memory_metrics
        """,
        REPORTS: "trackio_bucket_id trackio_static_space_id",
        UPLOADS: """
            push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
            push_to_hub_model_id push_to_hub_organization push_to_hub_token
        """,
        COMPILES: "torch_compile torch_compile_backend torch_compile_mode torchdynamo jit_mode_eval",
        KERNELS: "use_liger_kernel liger_kernel_config use_ipex",
        SAVES: """
            save_strategy save_only_model save_on_each_node save_safetensors enable_jit_checkpoint ignore_data_skip
            restore_callback_states_from_checkpoint
        """,
        EVALUATES: """
            do_eval do_predict eval_delay prediction_loss_only eval_do_concat_batches eval_use_gather_object
            eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics bf16_full_eval
            fp16_full_eval
        """,
        GENERATES: "predict_with_generate generation_max_length generation_num_beams generation_config use_cache",
        READS: """
            remove_unused_columns label_names length_column_name dataloader_num_workers
            dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
            dataloader_multiprocessing_context dataloader_in_order dispatch_batches split_batches sortish_sampler
        """,
        "every step has all its rows, also where an epoch ends in it": "dataloader_drop_last",
        ONE_DEVICE: """
            average_tokens_across_devices ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
            ddp_find_unused_parameters ddp_static_graph ddp_timeout local_rank parallelism_config ray_scope
            mp_parameters tpu_num_cores tpu_metrics_debug
        """,
        "fp32 is computed in fp32; bf16: true is the fast way": "tf32",
        "seed decides the order of the data, too": "data_seed",
        "an output_dir must be empty": "overwrite_output_dir",
        SAYS_NOTHING: "do_train debug past_index resume_from_checkpoint",
    },
    planner="""
        gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs torch_empty_cache_steps
        auto_find_batch_size use_cpu no_cuda use_mps_device accelerator_config fsdp fsdp_config
        fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap deepspeed
    """,
    not_there={
        FP16: "fp16 fp16_backend fp16_opt_level half_precision_backend",
        OPTIMIZER: "optim_args optim_target_modules adafactor",
    },
    parts={"load_best_model_at_end": "metric_for_best_model greater_is_better"},
    fine={
        "fp16_backend": ("auto",),
        "half_precision_backend": ("auto",),
        "fp16_opt_level": ("O1",),
    },
)

REPORTING = ("wandb_", "mlflow_", "comet_", "swanlab_", "trackio_")
"""Beginnings of keys that say where to report to, in any version of a tool."""
BEGINNINGS = dict.fromkeys(REPORTING, REPORTS) | {
    "liger_": KERNELS,
    "unsloth_": KERNELS,
    "flash_attn_": KERNELS,
    "fsdp_": DECIDES,
    "ddp_": ONE_DEVICE,
}
"""Beginnings of keys -> why such keys have no effect, also those that no table has."""

_METHODS_NOT_THERE = ("dpo", "orpo", "kto", "grpo", "oft", "llama-adapter")
_ADAMW = ("adamw_hf", "adamw_torch_npu_fused", "paged_adamw_32bit", "paged_adamw", "adamw_apex_fused", "adamw")
"""Other names of `adamw_torch`."""
_ADAMW_8BIT = ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_ADAMW_4BIT = "adamw_torch_4bit"
_FLASH = ("flash_attention", "kernels-", "flex_attention", "xformers", "sage", "fp8", "flash_attn")
_CHOOSING = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_steps")


def optimizer_of(value: object, file: File) -> object:
    """An optimizer's name in offmate's words."""
    if value in (*_ADAMW, _ADAMW_4BIT):
        return "adamw_torch"
    return AdamW8bit.kind if value in _ADAMW_8BIT else value


def _other_optimizer(file: File) -> bool:
    """Whether a file names an optimizer that offmate does not have."""
    named = [file[key] for key in ("optim", "optimizer") if file.get(key) not in SWITCHED_OFF]
    return any(optimizer_of(value, file) not in (*OPTIMIZERS,) for value in named)


def _attention(value: object, file: File) -> object:
    return "sdpa" if isinstance(value, str) and (value.startswith(_FLASH) or "/" in value) else value


def _share_of_steps(value: object, file: File) -> object:
    return None if isinstance(value, float) and value < 1 else value


def done_otherwise(key: str, name: str, value: object) -> str | None:
    """A note on a value that is carried out in another way than it asks for; None where no note is needed. `key`: the
    file's; `name`: offmate's."""
    if name == "attn_implementation" and key != "eager_attention" and value not in ("sdpa", "eager", *SWITCHED_OFF):
        return "attention is PyTorch's sdpa, which takes its flash kernel where there is one"
    if name == "save_steps" and isinstance(value, float) and value < 1:
        return "a share of the steps is not taken here, but a number of steps, 500 by itself, beside save_minutes"
    if name == "optim" and value == _ADAMW_4BIT:
        return "AdamW's moments are in fp32 here, or with adamw_8bit in 8 bits"
    if key in TOKENS and isinstance(value, dict) and value.get("pad_token"):
        return "padding is never learned, and keeps its token"
    return None


TOKENS = ("special_tokens", "tokens")
"""Keys whose mapping names tokens; `tokens` is axolotl's."""


def tokens_of(value: object, file: File) -> object:
    """A mapping of special tokens, without those that are empty."""
    if not isinstance(value, dict):
        return value
    return {name: token for name, token in value.items() if token} or None


def without_padding(tokens: object) -> object:
    """The special tokens of a job that is no reward model's: padding is never learned, and only the reward is where
    padding begins."""
    if not isinstance(tokens, dict):
        return tokens
    return {name: token for name, token in tokens.items() if name != "pad_token"} or None


def _share(key: str, value: object, source: Source) -> list[Mistake]:
    if value is None or (isinstance(value, (int, float)) and 0 <= value < 1):
        return []
    return [source.mistake(key, "bad-value", f"it is {shown(value)}; it must be a share of all steps, below 1")]


def _sampling(key: str, value: object, source: Source) -> list[Mistake]:
    if value in ("random", "group_by_length", *SWITCHED_OFF):
        return []
    text = f"it is {shown(value)}; the order is random, or has rows of like length together (group_by_length)"
    return [source.mistake(key, "not-there", text)]


def _fallback(key: str, value: object, source: Source) -> list[Mistake]:
    if not isinstance(value, str) or not value.startswith("tokenizer_default_fallback_"):
        return []
    text = f"a template for a tokenizer without one is not supported yet; give {value[27:]}, or leave this key out"
    return [source.mistake(key, "not-there", text)]


def check_by_name(key: str, name: str, value: object, source: Source) -> list[Mistake]:
    """Mistakes in values that tools give under several names. `key`: the file's; `name`: offmate's."""
    if name == "warmup_steps" and isinstance(value, float) and value >= 1 and not value.is_integer():
        return [source.mistake(key, "bad-value", f"it is {shown(value)}; 1 or more must be a whole number of steps")]
    if name == "method" and value in _METHODS_NOT_THERE:
        text = f"{value} is not supported yet; offmate does full fine-tuning, LoRA and LSP"
        return [source.mistake(key, "not-there", text)]
    if name == "optim" and any(kind in str(value).lower() for kind in ("galore", "apollo")):
        what, _, instead = PROJECTED.partition("; ")
        return [source.mistake(key, "not-there", f"it is {shown(value)}; {what} is not supported yet; {instead}")]
    return []


def _method(reading: Reading, key: str, value: object) -> None:
    if value == "qlora" and reading.file.get("load_in_4bit") is not True:
        reading.refuse_quantized(key, "qlora trains adapters on a base in 4 bits; give load_in_4bit: true, too")
    reading.read_as_table(key, value)


def _metric(reading: Reading, key: str, value: object) -> None:
    """The metric that chooses the best model, and its direction."""
    file = reading.file
    chosen = any(file.get(name) not in SWITCHED_OFF for name in _CHOOSING) or reading.tool.chooses_best(file)
    fine = (*SWITCHED_OFF, "eval_loss", "loss") if key == "metric_for_best_model" else SWITCHED_OFF
    if not chosen and value not in SWITCHED_OFF:
        reading.leave(key, "it has no effect without load_best_model_at_end")
    elif value not in fine:
        text = (
            f"it is {shown(value)}; the best evaluation is always the one with the smallest loss "
            "(eval_loss); leave this key out"
        )
        reading.refuse(key, text)


def _resume(reading: Reading, key: str, value: object) -> None:
    if value is True:
        reading.leave(key, "a job starts from its model, and resumes from its own checkpoints by itself")
    elif value not in SWITCHED_OFF:
        reading.refuse(
            key, (f"it is {shown(value)}; a job starts from its model and no other checkpoint; leave this key out")
        )


def _rate_of_embeddings(reading: Reading, key: str, value: object) -> None:
    """LoRA+'s rate for embeddings. Without LoRA+ it is refused in offmate's own files (`planner.keys.lora`); in a
    tool's file it has no effect, as tools write out their defaults."""
    if reading.tool is OWN or reading.file.get(PLUS) not in SWITCHED_OFF:
        reading.take(key, key)
    elif value not in SWITCHED_OFF:
        reading.leave(key, f"it has no effect without {PLUS}")


class Own(Tool):
    """offmate's own files, whose keys are those of transformers."""

    readers: ClassVar[Mapping[str, Reader]] = {
        **dict.fromkeys(("method", "adapter", "finetuning_type"), _method),
        "resume_from_checkpoint": _resume,
        "metric_for_best_model": _metric,
        "greater_is_better": _metric,
        PLUS_EMBEDDING: _rate_of_embeddings,
    }
    translations: ClassVar[Mapping[str, Translation]] = {
        "method": lambda value, _: method_of(value),
        "optim": optimizer_of,
        "attn_implementation": _attention,
        "gradient_checkpointing": lambda value, _: True if isinstance(value, str) else value,  # names of ways to do it
        "save_steps": _share_of_steps,
        "train_sampling_strategy": lambda value, _: True if value == "group_by_length" else None,
        "special_tokens": tokens_of,
        "chat_template": lambda value, _: None if value == "tokenizer_default" else value,
    }
    checks: ClassVar[Mapping[str, Check]] = {
        "warmup_ratio": _share,
        "train_sampling_strategy": _sampling,
        "chat_template": _fallback,
    }
    reported: ClassVar[Mapping[str, Callable[[File], bool]]] = dict.fromkeys(
        ("optim_args", "optim_target_modules"), _other_optimizer
    )


OWN = Own()

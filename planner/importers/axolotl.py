"""axolotl (its version 0.19): its keys, with those of earlier versions, their values and defaults, and where it trains
otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from planner.importers.axolotl_data import DATA, TEXTS, as_axolotl, check_texts, entries_of, long_texts, read_otherwise
from planner.importers.axolotl_preferences import NAME, READERS, defaults_of, loss_of
from planner.importers.base import (
    ATTENTION,
    CHANGED_MODEL,
    COMPILES,
    DIFFUSION,
    DISTILLED,
    ELSEWHERE,
    EVALUATES,
    FP16,
    GENERATES,
    ITS_RATE,
    KERNELS,
    LOGS,
    LOSS,
    ONE_DEVICE,
    OPTIMIZER,
    ORDER,
    OTHER_LORA,
    OWN_CODE,
    PICTURES,
    QUANTIZED,
    READS,
    REPORTS,
    REWARDS,
    SAVES,
    SAYS_NOTHING,
    SHAPE,
    SOME_WEIGHTS,
    STREAMS,
    UPLOADS,
    Check,
    File,
    Reader,
    Reading,
    Tool,
    Translation,
    makes_adapters,
    method_of,
    table,
)
from planner.importers.preferences import FROM_DATA, RPO
from planner.importers.transformers import optimizer_of, tokens_of
from planner.keys.evaluation import EVALUATED
from planner.keys.fields import DEFAULT_EPOCHS
from planner.keys.lora import ALL_LINEAR
from planner.keys.preference import REWARD
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown
from planner.optimizers.muon import ADJUST, ORIGINAL, Muon

_KEYS = table(
    same="""
        output_dir gradient_accumulation_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm
        max_steps warmup_steps seed bf16 gradient_checkpointing eval_steps eval_strategy save_steps save_total_limit
        chat_template chat_template_kwargs lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters
        attn_implementation special_tokens plugins min_sample_len dataset_exact_deduplication
        load_in_4bit load_in_8bit quantize_moe_experts group_by_length load_best_model_at_end early_stopping_patience
        label_smoothing_factor neftune_noise_alpha lora_modules_to_save loraplus_lr_ratio loraplus_lr_embedding
        embedding_lr embedding_lr_scale
        simpo_gamma center_rewards_coefficient
        wandb_project wandb_entity wandb_mode mlflow_tracking_uri mlflow_experiment_name trackio_project_name
        trackio_space_id
    """,
    honoured={
        "eval_steps": "evals_per_epoch",
        "model_revision": "revision_of_model",
        "model": "base_model",
        "run_name": "wandb_name",
        "report_to": "use_wandb use_mlflow use_trackio use_tensorboard",
        "tokenizer": "tokenizer_config",
        "add_tokens": "tokens",
        "dataset": "datasets pretraining_dataset roles_to_train train_on_eos train_on_eot eot_tokens",
        "eval_dataset": "test_datasets",
        "chat_template": "chat_template_jinja",
        "max_length": "sequence_len",
        "packing": "sample_packing",
        "train_on": "train_on_inputs",
        "per_device_train_batch_size": "micro_batch_size",
        "per_device_eval_batch_size": "eval_batch_size",
        "train_batch_size": "batch_size",
        "num_train_epochs": "num_epochs",
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
        "lr_scheduler_kwargs": "lr_scheduler_kwargs cosine_min_lr_ratio",
        "warmup_steps": "warmup_ratio",
        "method": "adapter",
        "lora_target_modules": "lora_target_linear",
        "val_size": "val_set_size",
        "eval_strategy": "evaluation_strategy",
        "long_rows": "excess_length_strategy",
        "layers_to_transform": "peft_layers_to_transform",
        "layers_pattern": "peft_layers_pattern",
        "init_lora_weights": "peft_init_lora_weights",
        "rank_pattern": "lora_rank_pattern",
        "alpha_pattern": "lora_alpha_pattern",
        "trainable": "unfrozen_parameters",
        "use_rslora": "peft_use_rslora",
        "use_dora": "peft_use_dora",
        "neftune_noise_alpha": "noisy_embedding_alpha",
        "adapter_name_or_path": "lora_model_dir",
        "gpu_budget": "gpu_memory_limit",
        "bf16": "bfloat16 float32",
        "attn_implementation": "eager_attention",
        "router_aux_loss_coef": "model_config overrides_of_model_config",
        "preference": "rl dpo_loss_type reward_model",
        "preference_beta": "rl_beta dpo_beta orpo_alpha trl",
        "preference_smoothing": "dpo_label_smoothing",
        "sft_weight": "cpo_alpha dpo_loss_weights",
        "desirable_weight": "kto_desirable_weight",
        "undesirable_weight": "kto_undesirable_weight",
    },
    unused={
        LOGS: """
            logging_steps include_tokens_per_second include_tkps profiler_steps profiler_steps_start
        """,
        "a run's name is run_name (wandb_name)": "mlflow_run_name trackio_run_name",
        REPORTS: """
            wandb_run_id wandb_watch wandb_log_model hf_mlflow_log_artifacts use_comet comet_api_key
            comet_workspace comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config
            use_otel_metrics otel_metrics_host otel_metrics_port use_swanlab
        """,
        ATTENTION: """
            flash_attention sdp_attention xformers_attention flex_attention sage_attention flash_optimum
            flex_attn_compile_kwargs gemma4_hybrid_attn_impl sdpa_varlen large_head_attention flash_attn_d512
            fused_attn_kernel
        """,
        "fp32 is computed in fp32; bf16: true is the fast way": "tf32",
        COMPILES: "torch_compile torch_compile_backend torch_compile_mode torch_compile_options deepcompile",
        READS: """
            dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset
            num_dataset_shards_to_save shuffle_merged_datasets shuffle_before_merging_datasets push_dataset_to_hub
            preprocess_iterable dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor
            dpo_padding_free
            remove_unused_columns sample_packing_group_size sample_packing_bin_size sample_packing_eff_est
            sample_packing_mp_start_method eval_sample_packing pad_to_sequence_len pad_to_multiple_of
            multipack_real_batches batch_flattening pretrain_multipack_buffer_size
            tokenizer_use_fast tokenizer_legacy total_num_tokens total_supervised_tokens max_packed_sequence_len
            sample_packing_seq_len_multiplier
        """,
        STREAMS: "streaming streaming_multipack_buffer_size",
        "every step has all its rows, also where an epoch ends in it": "dataloader_drop_last",
        "the embedding has the tokenizer's size, or is larger": """
            resize_token_embeddings_to_32x shrink_embeddings
        """,
        "new rows are drawn around the mean of the others": "mean_resizing_embeddings",
        "checkpoints come by save_steps and save_minutes; it only helps to decide whether load_best_model_at_end"
        " is on": "saves_per_epoch",
        SAVES: """
            save_strategy save_safetensors save_only_model save_first_step auto_resume_from_checkpoints
            dynamic_checkpoint tokenizer_save_jinja_files
        """,
        EVALUATES: """
            eval_sequence_len eval_table_size eval_max_new_tokens do_causal_lm_eval
            eval_causal_lm_metrics
            do_bench_eval bench_dataset bench_split lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model
        """,
        "no run is stopped by its loss": "loss_watchdog_threshold loss_watchdog_patience",
        GENERATES: """
            generate_samples num_generation_samples generation_max_new_tokens generation_temperature generation_top_p
            generation_top_k generation_prompt_ratio generation_do_sample gradio_title gradio_share gradio_server_name
            gradio_server_port gradio_max_new_tokens gradio_temperature vllm dpo_generate_during_eval
        """,
        KERNELS: """
            dpo_use_liger_kernel dpo_use_logits_to_keep
            lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels experts_implementation
            flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp chunked_cross_entropy
            chunked_cross_entropy_num_chunks unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv
            unsloth_lora_o unsloth_rms_norm unsloth_rope llama4_linearized_experts liger_rope liger_rms_norm
            liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy
            liger_rms_norm_gated liger_kernel_impl cut_cross_entropy expert_backend
            moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend use_scattermoe use_sonicmoe use_dsv4_kernels
            use_glm_dsa_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_fp4_grouped_mode
        """,
        FROM_DATA: "precompute_ref_log_probs",
        UPLOADS: "hub_model_id hub_strategy hf_use_auth_token hub_revision",
        OWN_CODE: "trust_remote_code model_type tokenizer_type type_of_model cls_model_config",
        "adapters are fp32, and so are masters": "peft_autocast_adapter_dtype embeddings_skip_upcast",
        "peft sees that by itself": "lora_fan_in_fan_out",
        "adapters are written by themselves; offmate export merges them": "merge_lora merge_method",
        "offmate export ID model.gguf writes such a file": "export",
        ONE_DEVICE: """
            world_size ddp use_ray ray_run_name ray_num_workers resources_per_worker heads_k_stride ring_attn_func
            dp_shard_size dp_replicate_size expert_parallel_size expert_parallel_backend
            expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
            expert_parallel_token_capacity local_rank ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers
            ddp_find_unused_parameters tensor_parallel_size context_parallel_size sequence_parallel_degree
        """,
        SAYS_NOTHING: """
            strict debug resume_from_checkpoint is_preprocess axolotl_config_path is_falcon_derived_model
            is_llama_derived_model is_mistral_derived_model is_qwen_derived_model max_prompt_len num_labels
            base_model_ignore_patterns
        """,
    },
    planner="""
        gradient_checkpointing_kwargs activation_offloading layer_offloading deepspeed fsdp fsdp_config fsdp_version
        fsdp_final_state_dict_type device device_map accelerator_config auto_find_batch_size max_memory
        low_cpu_mem_usage gc_steps
        gc_collect_steps torch_empty_cache_steps selective_checkpointing ple_cpu_offload
        lora_on_cpu
        qlora_sharded_model_loading tiled_mlp
        tiled_mlp_num_shards tiled_mlp_use_original_mlp experimental_skip_move_to_device
    """,
    not_there={
        "a config other than the model's": "base_model_config",
        CHANGED_MODEL: "rope_scaling scaling_softmax dense_mixer",
        "norms in fp32": "fp32_norms",
        "loading the model in another way": """
            overrides_of_model_kwargs model_quantization_config reinit_weights trainer_cls
        """,
        "a tokenizer of mistral-common": "tokenizer_use_mistral_common",
        QUANTIZED: """
            gptq qat quantization nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert
            dsv4_fp8_nonexpert_mode dsv4_bf16_all nvfp4_merge_aware use_onebitllms
        """,
        "sparse training": "llmcompressor",
        DISTILLED: "kd_trainer",
        DIFFUSION: "diffusion",
        ELSEWHERE: "hatchery",
        FP16: "fp16 float16",
        "fp8 training": "fp8",
        "fp4 training": "nvfp4_training",
        "shifted sparse attention": "s2_attention",
        REWARDS: "process_reward_model ebft nemo_gym_enabled",
        RPO: "rpo_alpha",
        PICTURES: "image_size freeze_mm_modules processor_type role_boundaries",
        OTHER_LORA: """
            peft_layer_replication peft_trainable_token_indices peft_ensure_weight_tying peft mora
        """,
        SOME_WEIGHTS: "relora relora_steps lisa_n_layers spectrum_top_fraction",
        OPTIMIZER: "optim_args optim_target_modules torchdistx_path dion_lr grokfast_alpha",
        ITS_RATE: "lr_groups",
        SHAPE: """
            cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor
            jagged_restart_steps
        """,
        LOSS: "use_eaft liger_use_token_scaling dpo_use_weighting dpo_norm_loss",
        "other texts for reserved tokens (change the tokenizer's files)": "added_tokens_overrides",
        "setting rows of tokens that were never learned": "fix_untrained_tokens",
        ORDER: "curriculum_sampling sample_packing_sequentially",
        "a part of the data": "dataset_shard_num dataset_shard_idx",
        "longer contexts by PoSE": "use_pose",
        "another system message (write it into the template)": "default_system_message",
    },
    parts={
        "load_in_4bit": "bnb_config_kwargs",
        "model_quantization_config": "model_quantization_config_kwargs",
        "fp8": "fp8_config fp8_enable_fsdp_float8_all_gather",
        "gptq": "gptq_groupsize gptq_model_v1 gptq_disable_exllama",
        "fp32_norms": "fp32_norm_classes",
        "nvfp4_merge_aware": "nvfp4_merge_aware_start_step",
        "kd_trainer": """
            kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server kd_online_server_base_url kd_online_timeout
            kd_online_topk kd_temperature kd_temperature_min
        """,
        "nemo_gym_enabled": """
            nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets nemo_gym_dir
            nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn nemo_gym_run_timeout
            nemo_gym_server_timeout nemo_gym_verify_timeout
        """,
        "processor_type": "processor_kwargs",
        "spectrum_top_fraction": "spectrum_model_name",
        "grokfast_alpha": "grokfast_lamb",
        "optim_target_modules": """
            qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant
            qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap
        """,
        "image_size": "image_resize_algorithm",
        "relora": """
            relora_prune_ratio relora_prune_method relora_cpu_offload relora_warmup_steps relora_anneal_steps
        """,
        "jagged_restart_steps": "jagged_restart_warmup_steps jagged_restart_anneal_steps",
        "lisa_n_layers": "lisa_step_interval lisa_layers_attribute",
        "optimizer: came_pytorch": "adam_beta3 adam_epsilon2",
        "dion_lr": "dion_momentum dion_rank_fraction dion_rank_multiple_of",
        "scaling_softmax": "scaling_softmax_factor scaling_softmax_bias",
        "use_pose": "pose_split_on_token_ids pose_max_context_len pose_num_chunks",
        "use_eaft": "eaft_alpha eaft_k",
        "pretraining_dataset": "pretraining_sample_concatenation pretrain_multipack_attn",
        "load_best_model_at_end": "metric_for_best_model greater_is_better",
    },
    fine={
        "dsv4_fp8_nonexpert_mode": ("none",),
        "nonexpert_quantization": ("none", "bf16"),
        "rope_scaling": ("none",),
    },
)

_PLUGINS = {
    "liger": KERNELS,
    "cut_cross_entropy": KERNELS,
    "kernels": KERNELS,
    "expert_parallel": ONE_DEVICE,
    "swanlab": REPORTS,
    "lm_eval": EVALUATES,
}
"""Plugins that change nothing that is learned -> why they have no effect here."""
_PER_EPOCH = "evals_per_epoch"
_CONFIGS = ("model_config", "overrides_of_model_config")
"""Keys that change the model's config."""
_ROUTERS, _SHARE = "output_router_logits", "router_aux_loss_coef"
_LONG = {"truncate": "cut", "raise": "refuse"}
_RANGE = re.compile(r"\[\d*:?\d*\]$")
_DOT = re.compile(r"(?<!\\)\.(?!\+)")


# ---- keys that need more than the table


def _plugins(reading: Reading, key: str, value: object) -> None:
    """Plugins; those that would change what is learned are refused."""
    plugins = [value] if isinstance(value, str) and value else value
    for plugin in plugins if isinstance(plugins, list) else ():
        why = next((why for known, why in _PLUGINS.items() if known in str(plugin).lower()), None)
        if why is None:
            reading.refuse(key, f"{plugin} is not supported; leave it out")
        elif key not in reading.unused.get(why, ()):
            reading.leave(key, why)


def _bnb_config(reading: Reading, key: str, value: object) -> None:
    """The config of bitsandbytes; values that are offmate's own have no effect."""
    here = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    asks = value if isinstance(value, dict) else {}
    other = [name for name, wanted in here.items() if asks.get(name, wanted) != wanted]
    if value in SWITCHED_OFF or value == ["none"]:
        return
    if reading.file.get("load_in_4bit") in SWITCHED_OFF:
        reading.leave(key, "it has no effect without load_in_4bit")
    elif other:
        reading.refuse(key, f"{other[0]} is a key of the job itself in offmate; move it out of {key}")
    else:
        reading.leave(key, "a base in 4 bits is so here, too")


def _unpacked(reading: Reading, key: str, value: object) -> None:
    """The way to say that a model published in mxfp4 or fp8 is unpacked; here that happens by itself."""
    more = reading.file.get("model_quantization_config_kwargs")
    if value in ("Mxfp4Config", "FineGrainedFP8Config") and isinstance(more, dict) and more == {"dequantize": True}:
        reading.leave(key, "a model that was saved in mxfp4 or fp8 is unpacked as it is read")
    elif value not in SWITCHED_OFF:
        reading.refuse(key, "loading the model in another way is not supported yet; leave this key out")


def _tokens(reading: Reading, key: str, value: object) -> None:
    """`tokens`. A mapping is the early form of `special_tokens`."""
    if isinstance(value, dict) and reading.tool is AXOLOTL:
        reading.take(key, "special_tokens")
    else:
        reading.read_as_table(key, value)


# ---- values


def _patterns(patterns: object, file: File) -> object:
    """`unfrozen_parameters` as regular expressions, in which dots stand for themselves."""
    if not isinstance(patterns, list):
        return patterns
    return [_DOT.sub(r"\\.", pattern) if isinstance(pattern, str) else pattern for pattern in patterns]


def _no_rows(key: str, value: object, source: Source) -> list[Mistake]:
    listed = value if isinstance(value, list) else [value]
    rows = next((text for text in listed if isinstance(text, str) and _RANGE.search(text)), None)
    if rows is None:
        return []
    text = (
        f"it has {shown(rows)}, and training some rows of a weight is not supported yet; give its name without the rows"
    )
    return [source.mistake(key, "not-there", text)]


def _routers_share(value: object, file: File) -> object:
    """The share of the routers' loss that a changed config asks for; "auto" for the config's own."""
    if not isinstance(value, dict):
        return value
    share = value.get(_SHARE)
    return (("auto" if share is None else share) if value.get(_ROUTERS) else 0) if value else None


def _only_routers(key: str, value: object, source: Source) -> list[Mistake]:
    if value in SWITCHED_OFF:
        return []
    asks = value if isinstance(value, dict) else {shown(value): None}
    if other := [name for name in asks if name not in (_ROUTERS, _SHARE)]:
        text = f"it has {other[0]}; a changed model is not supported yet (change its config.json)"
        return [source.mistake(key, "not-there", text)]
    if isinstance(asks.get(_ROUTERS), bool):
        return []
    text = f"{_SHARE} needs {_ROUTERS}: true or false beside it; give both"
    return [source.mistake(key, "bad-value", text)]


def _templates(file: File) -> File | None:
    if set(file) != {"chat_template", "chat_template_jinja"}:
        return None
    if file["chat_template_jinja"] and file["chat_template"] in (None, "", "jinja"):
        return {"chat_template_jinja": file["chat_template_jinja"]}
    return {"chat_template": file["chat_template"]}


def _targets(file: File) -> File | None:
    """All linear layers beside those that are named."""
    if set(file) != {"lora_target_linear", "lora_target_modules"}:
        return None
    linear, named = file["lora_target_linear"] is True, file["lora_target_modules"]
    if not linear or named in SWITCHED_OFF:
        return {"lora_target_linear": True} if linear else {"lora_target_modules": named}
    return {"lora_target_modules": [ALL_LINEAR, *(named if isinstance(named, list) else [named])]}


def settle_evaluations(reading: Reading, values: dict[str, Any], names: dict[str, str]) -> None:
    """Settle the evaluations per epoch, where there is something to evaluate on, as a share of all steps. It depends on
    `values`, with the tool's defaults in them. `names`: offmate's key -> its name in the file."""
    source, per_epoch = reading.source, reading.file.get(_PER_EPOCH)
    epochs = values.get("num_train_epochs", DEFAULT_EPOCHS)
    text, code = None, "bad-value"
    if per_epoch in SWITCHED_OFF:
        return
    if isinstance(per_epoch, bool) or not isinstance(per_epoch, (int, float)) or not 0 < per_epoch < float("inf"):
        text = f"it is {shown(per_epoch)}; it must be a number above 0"
    elif "eval_steps" in names and values["eval_steps"] not in SWITCHED_OFF:
        text, code = f"{names['eval_steps']} is given too, and both mean eval_steps; keep one", "two-names"
    elif values.get("eval_strategy") == "epoch":
        text = f"{names['eval_strategy']} is epoch, which means one evaluation after each epoch; keep one of the two"
    elif all(values.get(name) in SWITCHED_OFF for name in EVALUATED):
        reading.leave(_PER_EPOCH, "there is nothing to evaluate on")
    elif isinstance(epochs, (int, float)) and epochs > 0 and per_epoch * epochs > 1:
        names["eval_steps"], values["eval_steps"] = _PER_EPOCH, 1.0 / (per_epoch * epochs)
    else:
        reading.leave(_PER_EPOCH, "an evaluation comes after each epoch")
    if text is not None:
        reading.mistakes.append(source.mistake(_PER_EPOCH, code, text))


def _per_save(file: File, steps: str, per_epoch: str) -> float | None:
    """The steps between two saves or evaluations, or their share of all steps, from a number per epoch. None where
    neither is given."""
    between, times, epochs = file.get(steps), file.get(per_epoch), file.get("num_epochs") or 1
    if isinstance(times, (int, float)) and isinstance(epochs, (int, float)) and times > 0 < epochs:
        return 1.0 / (times * epochs)
    return between if isinstance(between, (int, float)) and between > 0 else None


def _new_tokens(values: Mapping[str, Any]) -> list[object]:
    """The tokens that axolotl adds to the tokenizer where it lacks them: `add_tokens` and its special tokens. [] for
    wrong values, which are reported elsewhere."""
    tokens, special = values.get("add_tokens") or [], values.get("special_tokens") or {}
    if not isinstance(tokens, list) or not isinstance(special, dict):
        return []
    more = special.get("additional_special_tokens")
    named = [token for name, token in special.items() if name != "additional_special_tokens"]
    tokens = [*named, *tokens, *(more if isinstance(more, list) else ())]  # in axolotl's order
    return [token for place, token in enumerate(tokens) if token not in tokens[:place]]


class Axolotl(Tool):
    """axolotl."""

    name = NAME
    keys = _KEYS
    chooses_loss = "rl"
    defaults: ClassVar[Mapping[str, Any]] = {
        "max_length": 512,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "bf16": "auto",
        "long_rows": "drop",
    }
    lora_defaults: ClassVar[Mapping[str, Any]] = {"lora_dropout": 0.0}
    readers: ClassVar[Mapping[str, Reader]] = {
        "bnb_config_kwargs": _bnb_config,
        "model_quantization_config": _unpacked,
        "plugins": _plugins,
        "tokens": _tokens,
        **READERS,
        _PER_EPOCH: lambda *_: None,  # `settle_evaluations` reads it when all values are known
    }
    translations: ClassVar[Mapping[str, Translation]] = {
        "adapter": lambda value, _: "full" if value in SWITCHED_OFF else method_of(value),
        "train_on_inputs": lambda value, _: None if value is None else "all" if value else "completions",
        "bfloat16": lambda value, _: True if value else None,
        "float32": lambda value, _: False if value else None,
        "bf16": lambda value, _: True if value == "full" else value,
        "unfrozen_parameters": _patterns,
        TEXTS: lambda value, _: entries_of(value),
        "lora_target_linear": lambda value, _: True if value is True else None,
        "peft_init_lora_weights": lambda value, _: value or None,  # where it is false, axolotl gives peft nothing
        **dict.fromkeys(_CONFIGS, _routers_share),
        "eager_attention": lambda value, _: "eager" if value else None,
        "optimizer": optimizer_of,
        "gpu_memory_limit": lambda value, _: f"{value}GB" if isinstance(value, int) else value,
        "excess_length_strategy": lambda value, _: _LONG.get(str(value), value),
        "tokens": tokens_of,
        **dict.fromkeys(("rl", "reward_model"), lambda value, file: loss_of(file)),
        "trl": lambda value, file: value.get("beta") if isinstance(value, dict) else value,
        **dict.fromkeys(("kto_desirable_weight", "kto_undesirable_weight"), lambda value, _: value or 1.0),  # as there
    }
    checks: ClassVar[Mapping[str, Check]] = {
        TEXTS: lambda _, value, source: check_texts(value, source),
        "unfrozen_parameters": _no_rows,
        **dict.fromkeys(_CONFIGS, _only_routers),
    }
    joins = (_templates, _targets)
    switches = ("train_on_inputs", "bfloat16", "float32", "eager_attention")
    dtypes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "bfloat16": {"True": "bfloat16"},
        "float32": {"True": "float32"},
        "bf16": {"full": "bfloat16"},
    }
    reported: ClassVar[Mapping[str, Callable[[File], bool]]] = {
        "relora_steps": lambda file: file.get("relora") not in SWITCHED_OFF
    }

    def shows(self, keys: Collection[str]) -> bool:
        return "base_model" in keys

    def loss(self, file: File) -> str | None:
        return super().loss(file) or loss_of(file)

    def missing(self, values: Mapping[str, Any]) -> list[str]:
        """The learning rate, rank, alpha and targets of new adapters, and the margin of SimPO, for which axolotl has no
        defaults."""
        required = ["learning_rate"]
        required += ["lora_r", "lora_alpha", "lora_target_modules"] if makes_adapters(values) else []
        required += ["simpo_gamma"] if values.get("preference") == "simpo" else []
        return [key for key in required if values.get(key) is None]

    def chooses_best(self, file: File) -> bool:
        """axolotl does where every save falls on an evaluation, by its own arithmetic with shares of all steps."""
        if file.get("eval_strategy") in ("no", False):
            return False
        save, every = (_per_save(file, f"{name}_steps", f"{name}s_per_epoch") for name in ("save", "eval"))
        evaluates = bool(file.get("val_set_size") or file.get("test_datasets"))
        return evaluates and bool(save and every and save % every == 0)

    def absent(self, values: dict[str, Any], file: File) -> dict[str, Any]:
        absent = dict(self.defaults)
        if makes_adapters(values):
            absent |= self.lora_defaults
            if values.get("lora_target_parameters") not in SWITCHED_OFF:
                absent["lora_target_modules"] = []  # parameters may be the only targets
        loss = self.loss(file)
        if loss is not None:
            absent |= defaults_of(loss, values, file)
        elif _are_completions(values.get("dataset")):
            absent["long_rows"] = "split"
        if long := long_texts(file, packs=values.get("packing") is True):
            absent["long_rows"] = long
        if values.get("optim") == Muon.kind:
            absent[ADJUST] = ORIGINAL
        if tokens := _new_tokens(values):
            values["add_tokens"] = tokens
        return absent

    def differences(self, values: dict[str, Any], filled: Collection[str], file: File) -> Iterator[str]:
        packs = values.get("packing") is True
        if ADJUST in filled:
            yield "its Muon is torch.optim.Muon here, whose steps of wide matrices are larger"
        if all(values.get(key) not in SWITCHED_OFF for key in ("loraplus_lr_ratio", "weight_decay")):
            values["weight_decay"] = 0.0
            yield "weight_decay is 0, as axolotl's LoRA+ has none"
        if packs and values.get("router_aux_loss_coef"):
            yield "the routers' loss leaves out the padding of packed rows, which axolotl counts"
        if values.get("preference") == REWARD and values.get("long_rows") == "drop":
            yield "pairs longer than max_length are left out, which axolotl cuts at their end"
        yield read_otherwise(file, packs=packs)

    def settle_data(
        self, values: dict[str, Any], names: Mapping[str, str], source: Source, folder: Path
    ) -> list[Mistake]:
        for key in DATA:
            if isinstance(entries := values.get(key), (str, list)):
                values[key] = [as_axolotl(entry) for entry in (entries if isinstance(entries, list) else [entries])]
        return []


def _are_completions(entries: object) -> bool:
    """Whether all data are plain texts (`completion`), of which axolotl leaves nothing out."""
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and str(entry.get("type")).startswith("completion") for entry in entries
    )


AXOLOTL = Axolotl()

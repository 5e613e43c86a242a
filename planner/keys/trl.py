"""The keys of TRL's files beside those of transformers: `SFTConfig`, `ModelConfig`, `ScriptArguments` and
`DatasetMixtureConfig`, with those of earlier versions, and those of its trainers for preferences and rewards."""

from __future__ import annotations

from planner.keys.meaning import (
    LOSS,
    OTHER_LORA,
    OWN_CODE,
    READS,
    REWARDS,
    SAYS_NOTHING,
    STREAMS,
    Table,
    table,
)
from planner.keys.transformers import TRANSFORMERS

PREFERENCES = table(
    not_there={
        REWARDS: """
            reward_funcs reward_model_path max_prompt_length max_completion_length num_generations
            beta label_smoothing loss_weights use_weighting ld_alpha discopop_tau f_divergence_type
            f_alpha_divergence_coef precompute_ref_log_probs precompute_ref_batch_size sync_ref_model
            ref_model_mixup_alpha ref_model_sync_steps ref_model_init_kwargs ref_adapter_name model_adapter_name
            reference_free rpo_alpha generate_during_eval desirable_weight undesirable_weight
            center_rewards_coefficient disable_dropout
            num_generations_eval num_iterations steps_per_generation generation_batch_size generation_kwargs
            temperature top_p top_k min_p repetition_penalty epsilon epsilon_high delta entropy_coef
            entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy
            top_entropy_quantile importance_sampling_level multi_objective_aggregation off_policy_mask_threshold
            reward_weights reward_clip_range scale_rewards normalize_advantages mask_truncated_completions
            max_tool_calling_iterations sapo_temperature_neg sapo_temperature_pos use_bias_correction_kl
            vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos cache_implementation cast_lm_head_to_fp32
            ds3_gather_for_generation log_completions log_completions_hub_repo log_multimodal log_unique_prompts
            num_completions_to_print transformers_continuous_batching_config use_transformers_continuous_batching
            use_transformers_paged use_vllm vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
            vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
            vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode
            vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
            vllm_structured_outputs_regex vllm_tensor_parallel_size
        """,
    },
)
"""Keys of `DPOConfig`, `KTOConfig`, `GRPOConfig`, `RLOOConfig` and `RewardConfig` alone. In a file that is not
recognized as TRL's some of them would be typing mistakes."""
TRL: Table = (
    PREFERENCES
    | TRANSFORMERS
    | table(
        same="""
        use_rslora use_dora attn_implementation lora_r
        lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save
        max_length packing router_aux_loss_coef model_revision load_in_4bit load_in_8bit bnb_4bit_quant_type
        chat_template_kwargs
    """,
        honoured={
            "model": "model_name_or_path",
            "dataset": "dataset_name datasets dataset_config dataset_train_split dataset_text_field",
            "chat_template": "chat_template_path",
            "max_length": "max_seq_length",
            "packing": "packing_strategy",
            "train_on": "assistant_only_loss completion_only_loss",
            "method": "use_peft",
            "special_tokens": "eos_token",
            "bf16": "dtype torch_dtype",
            "val_size": "test_split_size",
            "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
        },
        unused={
            OWN_CODE: "trust_remote_code",
            READS: """
            dataset_num_proc dataset_batch_size shuffle_dataset padding_free pad_to_multiple_of eval_packing
            num_of_sequences chars_per_token
        """,
            STREAMS: "dataset_streaming streaming",
            "padding is never learned": "pad_token",
            SAYS_NOTHING: "ignore_bias_buffers gradient_checkpointing_use_reentrant",
        },
        planner="activation_offloading",
        not_there={
            "loading the model in another way": "model_init_kwargs",
            "preparing the data in another way": "dataset_kwargs",
            "cutting long rows at their beginning": "truncation_mode",
            LOSS: "loss_type",
            OTHER_LORA: "lora_task_type",
            "another choice of special tokens around a text": "add_special_tokens",
        },
        parts={
            "load_in_4bit": "bnb_4bit_quant_storage",
            "eval_strategy": "dataset_test_split",
        },
        fine={
            "truncation_mode": ("keep_start",),
            "loss_type": ("nll", "chunked_nll"),
            "lora_task_type": ("CAUSAL_LM",),
            "dataset_kwargs": ({"skip_prepare_dataset": False},),
        },
    )
)

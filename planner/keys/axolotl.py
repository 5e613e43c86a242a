"""The keys of axolotl's files, including those of earlier versions."""

from __future__ import annotations

from planner.keys.meaning import (
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
    Table,
    table,
)

AXOLOTL: Table = table(
    same="""
        output_dir gradient_accumulation_steps learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon
        max_grad_norm
        max_steps warmup_steps seed bf16 gradient_checkpointing eval_steps eval_strategy save_steps save_total_limit
        chat_template chat_template_kwargs lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters
        attn_implementation special_tokens plugins min_sample_len dataset_exact_deduplication
        load_in_4bit load_in_8bit quantize_moe_experts group_by_length load_best_model_at_end early_stopping_patience
        label_smoothing_factor neftune_noise_alpha lora_modules_to_save loraplus_lr_ratio loraplus_lr_embedding
        embedding_lr embedding_lr_scale
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
        "but for load_best_model_at_end, which is on where each save is at an evaluation; checkpoints come by"
        " save_steps and save_minutes": "saves_per_epoch",
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
            gradio_server_port gradio_max_new_tokens gradio_temperature vllm
        """,
        KERNELS: """
            lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel use_kernels experts_implementation
            flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp chunked_cross_entropy
            chunked_cross_entropy_num_chunks unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv
            unsloth_lora_o unsloth_rms_norm unsloth_rope llama4_linearized_experts liger_rope liger_rms_norm
            liger_layer_norm liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy
            liger_rms_norm_gated liger_kernel_impl cut_cross_entropy expert_backend
            moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend use_scattermoe use_sonicmoe use_dsv4_kernels
            use_glm_dsa_kernels dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel dsv4_fp4_grouped_mode
        """,
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
        REWARDS: "rl reward_model process_reward_model ebft nemo_gym_enabled",
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
        LOSS: "use_eaft liger_use_token_scaling",
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
        "rl": """
            trl dpo_use_weighting dpo_use_logits_to_keep dpo_label_smoothing dpo_norm_loss dpo_use_liger_kernel
            dpo_padding_free dpo_generate_during_eval dpo_loss_type dpo_loss_weights dpo_beta precompute_ref_log_probs
            orpo_alpha rpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta
        """,
        "reward_model": "center_rewards_coefficient",
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

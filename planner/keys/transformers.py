"""The keys of transformers' `TrainingArguments` and `Seq2SeqTrainingArguments`, which TRL's and LLaMA-Factory's files
have, too. Those of earlier versions are among them."""

from __future__ import annotations

from planner.keys.meaning import (
    COMPILES,
    EVALUATES,
    FP16,
    GENERATES,
    KERNELS,
    LOGS,
    ONE_DEVICE,
    OPTIMIZER,
    READS,
    REPORTS,
    SAVES,
    SAYS_NOTHING,
    UPLOADS,
    table,
)

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

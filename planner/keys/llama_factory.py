"""The keys of LLaMA-Factory's files beside those of transformers: its model, data, fine-tuning, generating and training
arguments. Those of earlier versions are among them."""

from __future__ import annotations

from planner.keys.meaning import (
    CHANGED_MODEL,
    EVALUATES,
    GENERATES,
    KERNELS,
    LEARNED,
    LOGS,
    LOSS,
    ONE_DEVICE,
    OPTIMIZER,
    ORDER,
    OTHER_FORM,
    OTHER_LORA,
    OWN_CODE,
    QUANTIZED,
    READS,
    REPORTS,
    REWARDS,
    SAYS_NOTHING,
    SOME_WEIGHTS,
    STREAMS,
    UPLOADS,
    Table,
    table,
)
from planner.keys.transformers import TRANSFORMERS

_INSTEAD = TRANSFORMERS.keys() - {"generation_max_length", "generation_num_beams"}
LLAMA_FACTORY: Table = {key: meaning for key, meaning in TRANSFORMERS.items() if key in _INSTEAD} | table(
    same="""
        dataset eval_dataset val_size packing max_samples lora_alpha
        lora_dropout use_rslora use_dora stage dataset_dir adapter_name_or_path model_revision mix_strategy
        interleave_probs loraplus_lr_ratio loraplus_lr_embedding add_tokens
    """,
    honoured={
        "model": "model_name_or_path",
        "chat_template": "template",
        "max_length": "cutoff_len",
        "packing": "neat_packing",
        "train_on": "train_on_prompt",
        "method": "finetuning_type",
        "lora_r": "lora_rank",
        "lora_target_modules": "lora_target",
        "bf16": "pure_bf16",
        "load_in_4bit": "quantization_bit",
        "bnb_4bit_quant_type": "quantization_type",
        "lora_modules_to_save": "additional_target",
        "early_stopping_patience": "early_stopping_steps",
        "bnb_4bit_use_double_quant": "double_quantization",
        "add_tokens": "add_special_tokens new_special_tokens",
        "optim": "use_muon",
        "init_lora_weights": "pissa_init",
        "router_aux_loss_coef": "moe_aux_loss_coef",
        "chat_template_kwargs": "enable_thinking",
    },
    unused={
        LOGS: """
            plot_loss include_effective_tokens_per_second print_param_status enable_torch_profiler profiler_output_dir
            profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
            profiler_profile_memory profiler_with_stack profile_modules
        """,
        REPORTS: """
            use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir
            swanlab_lark_webhook_url swanlab_lark_secret
        """,
        "attention is PyTorch's sdpa, which takes its flash kernel where there is one": "flash_attn",
        OWN_CODE: "trust_remote_code",
        KERNELS: "enable_liger_kernel use_v1_kernels",
        STREAMS: "streaming buffer_size",
        READS: """
            overwrite_cache preprocessing_batch_size preprocessing_num_workers
            use_fast_tokenizer ignore_pad_token_for_loss cache_dir data_shared_file_system
        """,
        EVALUATES: """
            eval_on_each_dataset eval_num_beams compute_accuracy task_dir task save_dir lang n_shot batch_size
            download_mode
        """,
        GENERATES: """
            do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty
            skip_special_tokens infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util
            vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size
            sglang_config sglang_lora_backend generation_max_length generation_num_beams kt_maxlen kt_use_cuda_graph
            kt_mode kt_force_think
        """,
        "the adapter is always written for the model as published": "pissa_convert",
        "the embedding has a row for each token, or more": "resize_vocab",
        UPLOADS: "hf_hub_token ms_hub_token om_hub_token export_hub_model_id",
        "the model is written as it was trained": """
            export_dir export_size export_device export_quantization_bit export_quantization_dataset
            export_quantization_nsamples export_quantization_maxlen export_legacy_format
        """,
        ONE_DEVICE: """
            ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers resources_per_worker placement_strategy
            ray_init_kwargs master_addr master_port
        """,
        "there are no pictures, sounds or videos": """
            media_dir image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels
            video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate freeze_vision_tower
            freeze_multi_modal_projector image_resolution video_resolution
        """,
        "norms and the head's output are fp32 where the model's own code has them so": """
            upcast_layernorm upcast_lmhead_output
        """,
        "the planner's block masks are exact": "block_diag_attn",
        "it has no effect without mask_history": "preserve_thinking",
        SAYS_NOTHING: "compute_dtype device_map model_max_length ref_model ref_model_adapters",
    },
    planner="""
        low_cpu_mem_usage use_unsloth use_unsloth_gc disable_gradient_checkpointing use_reentrant_gc offload_folder
        use_kt use_hyper_parallel hyper_parallel_args
        kt_optimize_rule cpu_infer chunk_size mode use_mca kt_expert_checkpoint_path
        tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
        expert_model_parallel_size expert_tensor_parallel_size context_parallel_size sequence_parallel
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather bias_activation_fusion apply_rope_fusion
        moe_grouped_gemm moe_token_dispatcher_type moe_permute_fusion recompute_granularity
    """,
    not_there={
        LEARNED: "mask_history",
        ORDER: "disable_shuffling",
        "another system message (write it into the template)": "default_system",
        "reading data that are tokenized already; give the dataset itself, and leave this key out": "tokenized_path",
        "tools in another form than the template's": "tool_format",
        "going on from adapters that are there": "adapter_folder",
        "a tokenizer that splits special tokens": "split_special_tokens",
        "new rows made from descriptions": "new_special_tokens_config",
        CHANGED_MODEL: "rope_scaling mixture_of_depths",
        "shifted sparse attention": "shift_attn",
        "random weights (give a folder with a config and none)": "train_from_scratch",
        QUANTIZED: "quantization_method kt_weight_path",
        "fp8 training": "fp8",
        OTHER_LORA: "kt_use_lora_experts",
        "merging adapter_name_or_path first (peft's merge_and_unload does, of a job's also offmate export ID: "
        "give what is saved then as the model, without both keys)": "create_new_adapter",
        OTHER_FORM: "train_dataset model_class dist_config peft_config kernel_config quant_config init_config",
        SOME_WEIGHTS: "use_llama_pro freeze_language_model",
        OPTIMIZER: "use_galore use_apollo use_badam use_adam_mini",
        LOSS: "use_dft_loss use_asft_loss use_eaft_loss",
        REWARDS: "reward_model pref_loss pref_ftx",
    },
    parts={
        "quantization_bit": "quantization_device_map",
        "fp8": "fp8_backend fp8_enable_fsdp_float8_all_gather",
        "add_special_tokens": "init_special_tokens",
        "pissa_init": "pissa_iter",
        "finetuning_type: freeze": "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        "finetuning_type: oft": "module_dropout oft_rank oft_block_size oft_target",
        "stage: dpo": """
            pref_beta pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma
            ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model_quantization_bit
            reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha
        """,
        "use_galore": """
            galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
        """,
        "use_apollo": """
            apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
            apollo_scale_type apollo_layerwise apollo_scale_front
        """,
        "use_badam": """
            badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode
            badam_verbose
        """,
        "kt_use_lora_experts": "kt_lora_expert_num kt_lora_expert_intermediate_size",
        "use_asft_loss": "asft_alpha",
        "use_eaft_loss": "eaft_alpha",
    },
    fine={
        "quantization_method": ("bnb", "bitsandbytes"),
        "rope_scaling": ("none",),
        "pref_loss": ("sigmoid",),
    },
)

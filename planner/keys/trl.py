"""The keys of TRL's files: `SFTConfig`, `ModelConfig` and `ScriptArguments`, beside those of transformers; those of
earlier versions among them."""

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

TRL: Table = TRANSFORMERS | table(
    same="""
        use_rslora use_dora attn_implementation lora_r
        lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save
        max_length packing router_aux_loss_coef model_revision load_in_4bit load_in_8bit bnb_4bit_quant_type
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
        "bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    },
    unused={
        OWN_CODE: "trust_remote_code",
        READS: """
            dataset_num_proc dataset_batch_size shuffle_dataset padding_free pad_to_multiple_of eval_packing
            num_of_sequences chars_per_token
        """,
        STREAMS: "dataset_streaming",
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
        REWARDS: "beta num_generations reward_funcs reward_model_path",
    },
    parts={
        "load_in_4bit": "bnb_4bit_quant_storage",
        "eval_strategy": "dataset_test_split",
        "beta": "max_prompt_length max_completion_length",
    },
    fine={
        "truncation_mode": ("keep_start",),
        "loss_type": ("nll", "chunked_nll"), "lora_task_type": ("CAUSAL_LM",),
        "dataset_kwargs": ({"skip_prepare_dataset": False},),
    },
)  # fmt: skip

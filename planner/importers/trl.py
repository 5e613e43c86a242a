"""TRL: its keys beside those of transformers (`SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig`,
with those of earlier versions, and those of its trainers for preferences and rewards), their values and defaults."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from planner.data.paths import looks_local
from planner.importers.base import (
    LOSS,
    OTHER_LORA,
    OWN_CODE,
    READS,
    REWARDS,
    SAYS_NOTHING,
    STREAMS,
    Check,
    File,
    Reader,
    Reading,
    Tool,
    Translation,
    makes_adapters,
    table,
)
from planner.importers.transformers import TRANSFORMERS
from planner.keys.lora import PEFTS_OWN
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

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
_KEYS = (
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

_DATA_KEYS = {"dataset_config": "name", "dataset_train_split": "split", "dataset_text_field": "field"}
"""Keys about the one dataset of a file -> those of an entry."""
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_STRATEGIES = ("bfd", "wrapped")


def settle_dataset(values: dict[str, Any], source: Source, folder: Path, *, for_trl: bool) -> list[Mistake]:
    """Put the keys about the file's one dataset into its entry. Returns mistakes. `for_trl`: the file is for TRL, which
    does not learn from instructions, and evaluates on a split of its dataset on the hub."""
    fields = {
        ours: source.values[key] for key, ours in _DATA_KEYS.items() if source.values.get(key) not in SWITCHED_OFF
    }
    fields = {
        key: value for key, value in fields.items() if (key, value) not in (("split", "train"), ("field", "text"))
    }
    path = values.get("dataset")
    if not isinstance(path, str):
        keys = [key for key, ours in _DATA_KEYS.items() if ours in fields]
        return [source.mistake(key, "bad-value", "it is for one dataset; say it in the entries") for key in keys]
    fields |= {"columns": {"instruction": ""}} if for_trl else {}
    if fields:
        values["dataset"] = [{"path": path, **fields}]
    evaluated = values.get("eval_strategy") not in SWITCHED_OFF and not {"eval_dataset", "val_size"} & values.keys()
    if for_trl and evaluated and not looks_local(path, folder):
        split = source.values.get("dataset_test_split") or "test"
        values["eval_dataset"] = [{"path": path, **fields, "split": split}]
    return []


def _dtype(key: str, value: object, source: Source) -> list[Mistake]:
    if value in SWITCHED_OFF or str(value) in (*_DTYPES, "auto"):
        return []
    text = f"it is {shown(value)}; bf16: true computes in bf16 with fp32 masters, without it all is fp32"
    return [source.mistake(key, "not-there", text)]


def _strategy(key: str, value: object, source: Source) -> list[Mistake]:
    if value in (*_STRATEGIES, *SWITCHED_OFF):
        return []
    text = f"it is {shown(value)}; documents are packed whole (bfd), or cut (wrapped)"
    return [source.mistake(key, "not-there", text)]


def _packing(file: File) -> File | None:
    if "packing_strategy" not in file or len(file) != 2:
        return None
    packing = next(value for key, value in file.items() if key != "packing_strategy")
    return {"packing": "wrapped" if packing is True and file["packing_strategy"] == "wrapped" else packing}


def _learned(file: File) -> File | None:
    if set(file) != {"assistant_only_loss", "completion_only_loss"}:
        return None
    only = "assistant_only_loss" if file["assistant_only_loss"] else "completion_only_loss"
    of_prompts = file[only] is True and file["completion_only_loss"] is False
    return {only: "all_answers" if of_prompts and only == "assistant_only_loss" else file[only]}


def _uncut(reading: Reading, key: str, value: object) -> None:
    """`max_length`: null, which cuts no row in TRL, is refused."""
    if value is None and reading.tool is TRL:
        text = "it is null, and TRL then cuts no row; give a number of tokens, at least those of the longest row"
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))
    else:
        reading.read_as_table(key, value)


def _switch(yes: object, no: object) -> Translation:
    """Translates true and false, and leaves all else."""
    return lambda value, _: (yes if value else no) if isinstance(value, bool) else value


class Trl(Tool):
    """TRL's `SFTTrainer`."""

    name = "TRL"
    keys = _KEYS
    defaults: ClassVar[Mapping[str, Any]] = {
        "learning_rate": 2e-5,
        "bf16": "auto",
        "train_on": "pairs",
        "router_aux_loss_coef": "auto",
        "router_aux_loss_mean": True,
    }
    lora_defaults: ClassVar[Mapping[str, Any]] = {
        "lora_r": 16,
        "lora_alpha": 32,
        "lora_dropout": 0.05,
        "lora_target_modules": PEFTS_OWN,
    }
    readers: ClassVar[Mapping[str, Reader]] = {"max_length": _uncut}
    translations: ClassVar[Mapping[str, Translation]] = {
        "use_peft": _switch("lora", "full"),
        "assistant_only_loss": _switch("answers", "pairs"),
        "completion_only_loss": _switch("pairs", "all"),
        **dict.fromkeys(
            ("dtype", "torch_dtype"), lambda value, _: True if str(value) in ("bfloat16", "bf16") else None
        ),
        "packing_strategy": lambda *_: None,  # it has no effect without packing
        "eos_token": lambda value, _: {"eos_token": value} if value else None,
    }
    checks: ClassVar[Mapping[str, Check]] = {
        **dict.fromkeys(("dtype", "torch_dtype"), _dtype),
        "packing_strategy": _strategy,
    }
    joins = (_packing, _learned)
    switches = ("use_peft", "assistant_only_loss", "completion_only_loss")
    dtypes: ClassVar[Mapping[str, Mapping[str, str]]] = dict.fromkeys(("dtype", "torch_dtype"), _DTYPES)

    def shows(self, keys: Collection[str]) -> bool:
        return "model_name_or_path" in keys

    def absent(self, values: dict[str, Any], file: File) -> dict[str, Any]:
        absent = dict(self.defaults)
        if makes_adapters(values):
            absent |= self.lora_defaults
            if values.get("lora_target_parameters") not in SWITCHED_OFF:
                absent["lora_dropout"] = 0.0  # peft refuses TRL's default for layers here
        if values.get("method") == "lora" and values.get("load_in_4bit") is True:
            absent["bnb_4bit_use_double_quant"] = False
        return absent


TRL = Trl()

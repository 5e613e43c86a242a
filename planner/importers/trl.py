"""TRL: its keys beside those of transformers (`SFTConfig`, `ModelConfig`, `ScriptArguments` and `DatasetMixtureConfig`,
with those of earlier versions, and those of its trainers for preferences and rewards), their values and defaults."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from planner.data.paths import looks_local
from planner.importers.base import (
    GENERATES,
    LENGTHS,
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
from planner.importers.preferences import (
    FROM_DATA,
    RPO,
    as_listed,
    dpo_loss,
    of_loss,
    of_trl,
    only_of,
    read_smoothing,
    read_weights,
    refuse_loss,
    refused_with_loss,
    sft_share,
    with_loss,
    without_loss,
)
from planner.importers.transformers import TRANSFORMERS
from planner.keys.lora import PEFTS_OWN
from planner.keys.preference import REWARD
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

PREFERENCES = table(
    same="desirable_weight undesirable_weight simpo_gamma center_rewards_coefficient",
    honoured={
        "preference_beta": "beta",
        "preference_smoothing": "label_smoothing",
        "sft_weight": "cpo_alpha loss_weights",
    },
    unused={
        FROM_DATA: "precompute_ref_log_probs precompute_ref_batch_size",
        GENERATES: "generate_during_eval",
        READS: "padding_value label_pad_token_id is_encoder_decoder",
        "it belongs to the loss discopop, which is not there": "discopop_tau",
    },
    not_there={
        LOSS: "use_weighting f_divergence_type",
        LENGTHS: "ld_alpha",
        RPO: "rpo_alpha",
        "another reference": "sync_ref_model ref_model_init_kwargs ref_adapter_name model_adapter_name reference_free",
        "dropout with preferences": "disable_dropout",
        "cutting prompts or answers apart from their row": "max_prompt_length max_completion_length",
        REWARDS: """
            reward_funcs reward_model_path num_generations
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
    parts={
        "f_divergence_type": "f_alpha_divergence_coef",
        "sync_ref_model": "ref_model_mixup_alpha ref_model_sync_steps",
    },
    fine={"f_divergence_type": ("reverse_kl",), "ld_alpha": (1, 1.0), "disable_dropout": (True,)},
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
            "preference": "loss_type",
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
            OTHER_LORA: "lora_task_type",
            "another choice of special tokens around a text": "add_special_tokens",
        },
        parts={
            "load_in_4bit": "bnb_4bit_quant_storage",
            "eval_strategy": "dataset_test_split",
        },
        fine={
            "truncation_mode": ("keep_start",),
            "lora_task_type": ("CAUSAL_LM",),
            "dataset_kwargs": ({"skip_prepare_dataset": False},),
        },
    )
)

_DATA_KEYS = {"dataset_config": "name", "dataset_train_split": "split", "dataset_text_field": "field"}
"""Keys about the one dataset of a file -> those of an entry."""
_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_STRATEGIES = ("bfd", "wrapped")
_OF_KTO = ("desirable_weight", "undesirable_weight")
_OF_CPO = ("cpo_alpha", "simpo_gamma")
_OF_DPO = ("loss_weights", "ld_alpha", "f_divergence_type", "use_weighting", "discopop_tau", "rpo_alpha")
"""Keys of one of TRL's trainers alone."""
_CENTER, _TASK, _CLASSIFIER = "center_rewards_coefficient", "lora_task_type", "SEQ_CLS"
"""Keys, and a value of the second one, by which a file is for TRL's RewardTrainer."""
_LIKELIHOODS = ("nll", "chunked_nll")
"""Values of `loss_type` with which a trainer for supervised fine-tuning has its usual loss."""


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


def loss_of(file: File) -> str | None:
    """The value of `preference` that the keys of one of TRL's trainers mean, None where none is meant, another loss, or
    no certain one. TRL's files do not name their trainer."""
    named = file.get("loss_type")
    if named == "kto" or (named is None and any(file.get(key) is not None for key in _OF_KTO)):
        return "kto"
    if named == "simpo" or (named in (None, "sigmoid") and any(file.get(key) is not None for key in _OF_CPO)):
        return "simpo" if named == "simpo" else "cpo"
    shown_by_others = [key for key in (*_OF_KTO, *_OF_CPO) if file.get(key) is not None]
    if shown_by_others or (named in SWITCHED_OFF and all(file.get(key) in SWITCHED_OFF for key in _OF_DPO)):
        rewards = file.get(_CENTER) is not None or file.get(_TASK) == _CLASSIFIER
        return REWARD if rewards and not shown_by_others else None
    return dpo_loss(named)


def _loss_type(reading: Reading, key: str, value: object) -> None:
    """`loss_type`, which trainers for supervised fine-tuning have, too."""
    if value in SWITCHED_OFF or value in _LIKELIHOODS:
        return
    file, loss = reading.file, loss_of(reading.file) if reading.tool is TRL else None
    if reading.tool is not TRL and (own := dpo_loss(value)) is not None and not isinstance(value, list):
        reading.refuse(key, f"it is a key of TRL's; give preference: {own} in its place")
    elif reading.tool is not TRL or str(value) == "dft":
        reading.refuse(key, f"{LOSS} is not supported yet; leave this key out")
    elif loss is None:
        refuse_loss(reading, key, value)
    elif loss != (own := reading.tool.loss(file)) and {loss, own} != {"dpo", "cpo"}:
        text = f"it is {shown(value)}, and preference is {own}; keep one of them"
        reading.mistakes.append(reading.source.mistake(key, "two-names", text))
    else:
        reading.take(key, "preference")
        if file.get("loss_weights") in SWITCHED_OFF:
            read_weights(reading, key, value, [1.0] * len(as_listed(value)))


def _loss_weights(reading: Reading, key: str, value: object) -> None:
    if value in SWITCHED_OFF:
        return
    if reading.tool.loss(reading.file) is None:
        without_loss(reading, key)
    else:
        read_weights(reading, key, reading.file.get("loss_type"), value)


def _smoothing(reading: Reading, key: str, value: object) -> None:
    (read_smoothing if reading.tool is TRL else of_loss)(reading, key, value)


def _telling(reading: Reading, key: str, value: object) -> None:
    """A key without effect that shows that a file of TRL's learns from preferences."""
    if reading.tool is TRL and reading.tool.loss(reading.file) is None and value not in SWITCHED_OFF:
        without_loss(reading, key)
    else:
        reading.read_as_table(key, value)


def _dropout(reading: Reading, key: str, value: object) -> None:
    if value is not None and reading.tool is TRL and reading.tool.loss(reading.file) is None:
        without_loss(reading, key)
    elif value is False and reading.tool.loss(reading.file) is not None:
        reading.refuse(
            key, "it is false; dropout beside a loss of preferences is not supported yet; leave this key out"
        )


def _task(reading: Reading, key: str, value: object) -> None:
    """peft's kind of task, by which a reward model's head is trained beside the adapters."""
    if reading.tool is not TRL or reading.tool.loss(reading.file) != REWARD:
        reading.read_as_table(key, value)
    elif value not in (_CLASSIFIER, *SWITCHED_OFF):
        text = f"it is {shown(value)}, with which peft does not train the head of a reward model; give {_CLASSIFIER}"
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))


def _peft(reading: Reading, key: str, value: object) -> None:
    file = reading.file
    if value is True and reading.tool is TRL and reading.tool.loss(file) == REWARD and file.get(_TASK) in SWITCHED_OFF:
        text = (
            f"TRL's default {_TASK} is CAUSAL_LM, with which peft does not train the head of a reward model; add "
            f"{_TASK}: {_CLASSIFIER}"
        )
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))
    else:
        reading.read_as_table(key, value)


def _padding(reading: Reading, key: str, value: object) -> None:
    if value is not None and reading.tool.loss(reading.file) == REWARD:
        text = f"the reward is that of the last token before it; give special_tokens: {{pad_token: {shown(value)}}}"
        reading.mistakes.append(reading.source.mistake(key, "not-there", f"{text} in its place"))
    else:
        reading.read_as_table(key, value)


def _order(reading: Reading, key: str, value: object) -> None:
    if value == "sequential" and reading.tool is TRL and reading.tool.loss(reading.file) == "kto":
        reading.leave(key, "rows come in a random order")
    else:
        reading.read_as_table(key, value)


def _preference(file: File) -> str | None:
    return Trl().loss(file)


def _switch(yes: object, no: object) -> Translation:
    """Translates true and false, and leaves all else."""
    return lambda value, _: (yes if value else no) if isinstance(value, bool) else value


class Trl(Tool):
    """TRL's `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `ORPOTrainer`, `CPOTrainer` and `RewardTrainer`."""

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
    readers: ClassVar[Mapping[str, Reader]] = {
        "max_length": _uncut,
        "loss_type": _loss_type,
        "loss_weights": only_of(name, _loss_weights),
        "label_smoothing": only_of(name, _smoothing),
        "use_weighting": refused_with_loss(),
        "disable_dropout": _dropout,
        _TASK: _task,
        "use_peft": _peft,
        "pad_token": _padding,
        "train_sampling_strategy": _order,
        "beta": of_loss,
        **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size", "generate_during_eval"), _telling),
        **dict.fromkeys(
            ("assistant_only_loss", "completion_only_loss"), with_loss("TRL scores the answers alone", name)
        ),
    }
    translations: ClassVar[Mapping[str, Translation]] = {
        "use_peft": _switch("lora", "full"),
        "assistant_only_loss": _switch("answers", "pairs"),
        "completion_only_loss": _switch("pairs", "all"),
        **dict.fromkeys(
            ("dtype", "torch_dtype"), lambda value, _: True if str(value) in ("bfloat16", "bf16") else None
        ),
        "loss_type": lambda _, file: _preference(file),
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

    def differences(self, values: dict[str, Any], filled: Collection[str], file: File) -> Iterator[str]:
        if values.get("preference") == "kto":
            yield "rows come in a random order, under seed, and in TRL's KTO in the order of the data"

    def loss(self, file: File) -> str | None:
        return super().loss(file) or loss_of(file)

    def absent(self, values: dict[str, Any], file: File) -> dict[str, Any]:
        absent = dict(self.defaults)
        if (loss := self.loss(file)) is not None:
            rate = 1e-4 if loss == REWARD else 1e-6
            absent = {"learning_rate": rate, "bf16": "auto", "preference": loss, **of_trl(loss, values)}
            share = sft_share(file.get("loss_type"), file.get("loss_weights"))
            absent |= {} if share is None else {"sft_weight": share}
        if makes_adapters(values):
            absent |= self.lora_defaults
            if values.get("lora_target_parameters") not in SWITCHED_OFF:
                absent["lora_dropout"] = 0.0  # peft refuses TRL's default for layers here
        if values.get("method") == "lora" and values.get("load_in_4bit") is True:
            absent["bnb_4bit_use_double_quant"] = False
        return absent


TRL = Trl()

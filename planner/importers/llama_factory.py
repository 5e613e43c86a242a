"""LLaMA-Factory (its version 0.9.6): its keys beside those of transformers, with those of earlier versions, their
values and defaults, and where it trains otherwise. Its v1 is in `planner.importers.llama_factory_v1`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from planner.importers.base import (
    CHANGED_MODEL,
    EVALUATES,
    GENERATES,
    KERNELS,
    LEARNED,
    LENGTHS,
    LOGS,
    LOSS,
    ONE_DEVICE,
    OPTIMIZER,
    ORDER,
    OTHER_FORM,
    OTHER_LORA,
    OWN_CODE,
    PROJECTED,
    QUANTIZED,
    READS,
    REPORTS,
    REWARDS,
    SAYS_NOTHING,
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
from planner.importers.llama_factory_data import settle_names
from planner.importers.llama_factory_templates import PARSED, PREFIX, has_slots, slot_template
from planner.importers.preferences import of_loss, only_of, refuse_loss, refused_with_loss, with_loss
from planner.importers.transformers import TRANSFORMERS
from planner.importers.trl import TRL
from planner.keys.lora import ADAPTER
from planner.keys.preference import PREFERENCES, REFERRING, REWARD, SFT_WEIGHTS
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown
from planner.keys.trainable import LAYERS, PLACE, TRAINABLE
from planner.optimizers.muon import Muon

_INSTEAD = TRANSFORMERS.keys() - {"generation_max_length", "generation_num_beams"}
NAME = "LLaMA-Factory"
_KEYS = {key: meaning for key, meaning in TRANSFORMERS.items() if key in _INSTEAD} | table(
    same="""
        dataset eval_dataset val_size packing max_samples lora_alpha
        lora_dropout use_rslora use_dora stage dataset_dir adapter_name_or_path model_revision mix_strategy
        interleave_probs loraplus_lr_ratio loraplus_lr_embedding add_tokens simpo_gamma ref_model
    """,
    honoured={
        "preference": "pref_loss",
        "preference_beta": "pref_beta",
        "preference_smoothing": "dpo_label_smoothing",
        "sft_weight": "pref_ftx",
        "desirable_weight": "kto_chosen_weight",
        "undesirable_weight": "kto_rejected_weight",
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
        SAYS_NOTHING: "compute_dtype device_map model_max_length",
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
        PROJECTED: "use_galore use_apollo",
        OPTIMIZER: "use_badam use_adam_mini",
        LOSS: "use_dft_loss use_asft_loss use_eaft_loss",
        LENGTHS: "ld_alpha",
        "a second loss of preferences beside the first (BCO)": "pref_bco_weight",
        "adapters for ref_model; merge them, and give the merged model as ref_model": "ref_model_adapters",
        "a quantized ref_model": "ref_model_quantization_bit",
        REWARDS: "reward_model",
    },
    parts={
        "quantization_bit": "quantization_device_map",
        "fp8": "fp8_backend fp8_enable_fsdp_float8_all_gather",
        "add_special_tokens": "init_special_tokens",
        "pissa_init": "pissa_iter",
        "finetuning_type: freeze": "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
        "finetuning_type: oft": "module_dropout oft_rank oft_block_size oft_target",
        "stage: ppo": """
            ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards
            reward_model_adapters reward_model_quantization_bit reward_model_type
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
        "ld_alpha": (1, 1.0),
    },
)

_TELLING = _KEYS.keys() - TRL.keys.keys() - {"dataset", "eval_dataset", "val_size", "max_samples", "ref_model"}
"""Keys that neither TRL nor offmate has."""
_STAGES, _OTHER_STAGES = ("sft", "pt", "dpo", "kto"), ("rm", "ppo")
_RM = "rm"
"""The stage that trains a reward model."""
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
"""Values of `pref_loss` -> values of the key `preference`."""
_ADDED = {"add_tokens", "add_special_tokens", "new_special_tokens"}
"""Keys with a value "a,b"."""


# ---- keys that need more than the table


def _stage(reading: Reading, key: str, value: object) -> None:
    if value in ("sft", "pt", *SWITCHED_OFF):
        return
    if value in (*_STAGES, _RM):
        _preferences(reading, key, value)
        return
    near = difflib.get_close_matches(str(value).lower(), (*_STAGES, *_OTHER_STAGES), n=1)
    if near and near[0] not in _OTHER_STAGES and value not in _LOSSES.values():
        text = f"it is {shown(value)}; did you mean {near[0]}?"
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))
    elif value in _OTHER_STAGES:
        refuse_loss(reading, key, value)
    else:
        reading.refuse(key, f"it is {shown(value)}; give {', '.join(_STAGES[:-1])} or {_STAGES[-1]}")


def _preferences(reading: Reading, key: str, value: object) -> None:
    """A stage that learns from preferences. An adapter that goes on is compared with the model without it: here that is
    another model, of which a quantized form is not read."""
    file = reading.file
    own = file.get("preference")
    if reading.tool.name != NAME:
        word = REWARD if value == _RM else value
        text = f"it is {shown(value)}, which is LLaMA-Factory's word; give preference: {word} in its place"
        reading.mistakes.append(reading.source.mistake(key, "bad-value", text))
    elif value == _RM and own != REWARD:
        text = (
            f"it is {shown(value)}; its head is another than transformers' classifiers have, with dropout before it; "
            f"that is not supported yet; add preference: {REWARD} to train one of these, without dropout"
        )
        reading.refuse(key, text, alone=True)
    elif own in PREFERENCES and (own == "kto", own == REWARD) != (value == "kto", value == _RM):
        text = f"it is {shown(value)}, and preference is {shown(own)}; keep one of them"
        reading.mistakes.append(reading.source.mistake(key, "two-names", text))
    elif _compares_without(file) and file.get("quantization_bit") not in SWITCHED_OFF:
        text = "LLaMA-Factory compares with the quantized model without it, which is not supported yet; give ref_model"
        reading.mistakes.append(reading.source.mistake(ADAPTER, "not-there", text))


def _compares_without(file: File) -> bool:
    """Whether the reference is the model without the adapter that the file goes on with."""
    return loss_of(file) in REFERRING and file.get(ADAPTER) not in SWITCHED_OFF and file.get("ref_model") is None


def _pref_loss(reading: Reading, key: str, value: object) -> None:
    if value is None:
        return
    if reading.file.get("stage") != "dpo":
        reading.leave(key, "it has no effect without stage: dpo")
    elif value in _LOSSES:
        reading.take(key, "preference")
    else:
        refuse_loss(reading, key, value)


def _pref_ftx(reading: Reading, key: str, value: object) -> None:
    if reading.tool.loss(reading.file) == "kto" and value not in SWITCHED_OFF:
        text = "a loss on chosen answers beside that of stage: kto is not supported yet; leave this key out"
        reading.mistakes.append(reading.source.mistake(key, "not-there", text))
    else:
        of_loss(reading, key, value)


def _of_reference(reading: Reading, key: str, value: object) -> None:
    """A key about `ref_model`, which LLaMA-Factory reads with it only."""
    loss = reading.tool.loss(reading.file)
    if reading.tool.name == NAME and (loss not in REFERRING or reading.file.get("ref_model") in SWITCHED_OFF):
        if value not in SWITCHED_OFF:
            reading.leave(key, "it has no effect without ref_model and a loss that compares with it")
    else:
        reading.read_as_table(key, value)


def _frozen(reading: Reading, key: str, value: object) -> None:
    """The keys for frozen layers, which `trained_layers` reads."""
    if reading.file.get("finetuning_type") != "freeze" and value not in SWITCHED_OFF:
        reading.leave(key, "it has no effect without finetuning_type: freeze")


def _padding(reading: Reading, key: str, value: object) -> None:
    if value in (False, "no", "false"):
        reading.refuse(key, "it is false; learning the padding is not supported yet; leave this key out")
    else:
        reading.read_as_table(key, value)


def _bits(reading: Reading, key: str, value: object) -> None:
    if value == 8:
        reading.take(key, "load_in_8bit")
    else:
        reading.read_as_table(key, value)


# ---- values


def loss_of(file: File) -> str | None:
    """The value of `preference` that `stage` and `pref_loss` mean; None where there is none, or another."""
    if file.get("stage") == "dpo":
        return _LOSSES.get(str(file.get("pref_loss") or "sigmoid"))
    return "kto" if file.get("stage") == "kto" else None


def _sft_weight(value: object, file: File) -> object:
    """`pref_ftx`, which is added to ORPO's own loss on chosen answers, and ignored where it is not above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return max(0.0, value) + SFT_WEIGHTS.get(str(loss_of(file)), 0.0)


def trained_layers(file: File) -> dict[str, object]:
    """What `finetuning_type: freeze` trains, as keys of a job."""
    modules, extra = _names(file.get("freeze_trainable_modules")), _names(file.get("freeze_extra_modules"))
    inside = [rf".*\.{PLACE}\.{re.escape(name) if name != 'all' else ''}" for name in modules or ("all",)]
    count = file.get("freeze_trainable_layers")
    return {LAYERS: 2 if count is None else count, TRAINABLE: [*inside, *(f".*{re.escape(name)}" for name in extra)]}


def _names(value: object) -> tuple[str, ...]:
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    return tuple(str(part).strip() for part in parts if str(part).strip())


def _pissa(value: object, file: File) -> object:
    """PiSSA, which is approximate unless `pissa_iter` is -1."""
    if not isinstance(value, bool):
        return value
    count = file.get("pissa_iter")
    count = 16 if count is None else count
    return None if not value else "pissa" if count == -1 else f"pissa_niter_{count}"


def _pissa_iterations(key: str, value: object, source: Source) -> list[Mistake]:
    count = source.values.get("pissa_iter")
    whole = isinstance(count, int) and not isinstance(count, bool)
    if value is not True or count is None or (whole and (count == -1 or 1 <= count <= 999)):
        return []
    text = f"it is {shown(count)}; it must be a number of iterations, or -1 for an exact decomposition"
    return [source.mistake("pissa_iter", "bad-value", text)]


def _two_widths(key: str, value: object, source: Source) -> list[Mistake]:
    if value in (4, 8, *SWITCHED_OFF):
        return []
    text = f"it is {shown(value)}; only a base in 4 or 8 bits is supported"
    return [source.mistake(key, "not-there", text)]


def _added_tokens(file: File) -> File | None:
    texts = [value for value in file.values() if isinstance(value, str)]
    return {next(iter(file)): ",".join(texts)} if set(file) <= _ADDED and len(texts) == len(file) else None


def _packing(file: File) -> File | None:
    return {"packing": any(map(bool, file.values()))} if set(file) == {"packing", "neat_packing"} else None


def _muon_alone(file: File) -> File | None:
    """LLaMA-Factory ignores all other names of an optimizer then."""
    return {"use_muon": True} if file.get("use_muon") is True else None


def _leave_room(values: dict[str, Any], absent: dict[str, Any]) -> None:
    """Reduce `max_length` by one, for a file that packs: LLaMA-Factory's packed rows are a token shorter than
    `cutoff_len`."""
    for part in (values, absent):
        if isinstance(part.get("max_length"), int) and not isinstance(part["max_length"], bool):
            part["max_length"] -= 1


def _rank(value: object) -> int:
    """A rank; 8 for a value that is no number, which is reported as a mistake elsewhere."""
    return value if isinstance(value, int) and value > 0 else 8


def _replace_end(values: dict[str, Any], file: File) -> str:
    """Put the end token of the file's `template` into `values`, as its `replace_eos` does. Returns a note for the user;
    "" where nothing is replaced."""
    name, special = file.get("template"), values.get("special_tokens") or {}
    template = slot_template(f"{PREFIX}{name}") if has_slots(name) else None
    texts = file.get("stage") == "pt" and name == "llama3"  # LLaMA-Factory ends these texts with another token
    if template is None or not template.replaces_eos or texts:
        return ""
    if not isinstance(special, dict) or "eos_token" in special:
        return ""
    end = template.stops[0]
    values["special_tokens"] = {"eos_token": end, **special}
    if file.get("resize_vocab") is True and values.get("add_tokens") in (None, ""):
        values["add_tokens"] = [end, *(["<|im_start|>"] if name == "chatml" else [])]
    return f"template: {name} makes {end} the tokenizer's end token, as there"


class LlamaFactory(Tool):
    """LLaMA-Factory, without its v1."""

    name = NAME
    keys = _KEYS
    chooses_loss = "stage: dpo or stage: kto"
    defaults: ClassVar[Mapping[str, Any]] = {"max_length": 2048, "long_rows": "share"}
    lora_defaults: ClassVar[Mapping[str, Any]] = {
        "lora_r": 8,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
    }
    readers: ClassVar[Mapping[str, Reader]] = {
        "stage": _stage,
        "pref_loss": only_of(NAME, _pref_loss),
        "pref_ftx": only_of(NAME, _pref_ftx),
        "ld_alpha": refused_with_loss((1, 1.0)),
        "pref_bco_weight": refused_with_loss(),
        **dict.fromkeys(("pref_beta", "kto_chosen_weight", "kto_rejected_weight", "ref_model"), of_loss),
        **dict.fromkeys(("ref_model_adapters", "ref_model_quantization_bit"), _of_reference),
        "moe_aux_loss_coef": with_loss("LLaMA-Factory adds no loss of routers to one of preferences", NAME),
        **dict.fromkeys(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"), _frozen),
        "ignore_pad_token_for_loss": _padding,
        "create_new_adapter": lambda reading, key, value: reading.read_beside(key, value, ADAPTER),
        "quantization_bit": _bits,
        "dataset_dir": lambda *_: None,  # `settle_names` reads it
    }
    translations: ClassVar[Mapping[str, Translation]] = {
        "finetuning_type": lambda value, _: "full" if value == "freeze" else method_of(value),
        "train_on_prompt": lambda value, _: None if value is None else "all" if value else "completions",
        "pure_bf16": lambda value, _: True if value else None,
        "quantization_bit": lambda value, _: True if value in (4, 8) else None,
        "pissa_init": _pissa,
        "pref_loss": lambda value, file: loss_of(file),
        "pref_ftx": _sft_weight,
        "moe_aux_loss_coef": lambda value, _: value or None,  # the config's own value then
        "use_muon": lambda value, _: Muon.kind if value is True else None,
        "enable_thinking": lambda value, _: (
            value if not isinstance(value, bool) else None if value else {"enable_thinking": value}
        ),
        "template": lambda value, _: (
            None if value == "tokenizer_default" else f"{PREFIX}{value}" if has_slots(value) else value
        ),
    }
    checks: ClassVar[Mapping[str, Check]] = {"quantization_bit": _two_widths, "pissa_init": _pissa_iterations}
    joins = (_added_tokens, _packing, _muon_alone)
    switches = ("train_on_prompt", "pure_bf16", "neat_packing", "use_muon", "pissa_init", "enable_thinking")
    takes_learned = False
    dtypes: ClassVar[Mapping[str, Mapping[str, str]]] = {"pure_bf16": {"True": "bfloat16"}}
    reported: ClassVar[Mapping[str, Callable[[File], bool]]] = {
        "quantization_method": lambda file: file.get("quantization_bit") not in (4, 8, *SWITCHED_OFF)
    }

    def shows(self, keys: Collection[str]) -> bool:
        return "model_name_or_path" in keys and not _TELLING.isdisjoint(keys)

    def loss(self, file: File) -> str | None:
        return super().loss(file) or loss_of(file)

    def absent(self, values: dict[str, Any], file: File) -> dict[str, Any]:
        absent = dict(self.defaults)
        if (loss := self.loss(file)) is not None:
            long = "drop" if loss == REWARD else "cut"
            absent |= {"preference": loss, "long_rows": long, "router_aux_loss_coef": 0}
            if values.get("sft_weight") or loss in SFT_WEIGHTS:
                absent["loss_weighting"] = "documents"
            if _compares_without(file):
                values["ref_model"] = values.get("model")
        if file.get("finetuning_type") is None:
            absent["method"] = "lora"
        if file.get("finetuning_type") == "freeze":
            values |= trained_layers(file)
        adapters = makes_adapters(absent | values)
        if (file.get("resize_vocab") is True or values.get("add_tokens")) and adapters:
            absent["lora_modules_to_save"] = ["embed_tokens", "lm_head"]
        if file.get("stage") != "pt":
            absent["chat_template"] = PARSED
        else:
            del absent["long_rows"]  # texts are cut at their end
            absent["packing"] = "wrapped"
            if values.get("packing") is True:  # the tool can pack texts in this way only
                values["packing"] = "wrapped"
        if adapters:
            absent |= self.lora_defaults
            absent["lora_alpha"] = 2 * _rank(values.get("lora_r", absent["lora_r"]))
        if values.get("packing") in (True, "wrapped"):
            _leave_room(values, absent)
        return absent

    def differences(self, values: dict[str, Any], filled: Collection[str], file: File) -> Iterator[str]:
        decay = values.get("weight_decay")
        if values.get("optim") == Muon.kind and isinstance(decay, (int, float)) and decay > 0:
            yield (
                "its Muon is torch.optim.Muon here and torch.optim.AdamW, and weight_decay leaves biases and norms "
                "alone, which it decays there"
            )
        embeds = any(word in str(values.get("lora_target_modules")) for word in ("emb", "wte"))
        if values.get("loraplus_lr_ratio") not in SWITCHED_OFF and embeds:
            yield (
                "loraplus_lr_embedding is for both matrices of an embedding's adapter, as in peft, and there for B "
                "alone"
            )
        if file.get("stage") == "pt" and values.get("packing") == "wrapped":
            yield (
                "all texts are learned to their end; LLaMA-Factory drops, of each 1000 texts, the last tokens "
                "that fill no row"
            )
        if values.get("packing") is True and file.get("neat_packing") in SWITCHED_OFF:
            yield (
                "packed documents do not attend to one another, as with neat_packing; without it they do in "
                "LLaMA-Factory"
            )
        if values.get("packing") in (True, "wrapped") and "packing" not in filled:
            yield f"max_length is {values['max_length']}, as packed rows are one token shorter than cutoff_len there"
        yield _replace_end(values, file)
        if values.get("preference") == REWARD:
            yield (
                "the reward model is a classifier of transformers, trained without dropout, and pairs longer than "
                "max_length are left out; LLaMA-Factory's has a head of its own with dropout, and pairs are cut"
            )
        elif values.get("preference") and "long_rows" in filled:
            yield "long rows are cut at their end; LLaMA-Factory cuts prompt and answer in proportion"
        if values.get("preference") == "kto" and values.get("per_device_train_batch_size") != 1:
            yield (
                "the answers that estimate KTO's divergence are those of the micro-batch's prompts, and there those of "
                "the row before in the data"
            )
        if values.get("preference") and _compares_without(file):
            yield "the reference is the model without the adapter, as there"
        if values.get("train_on") == "all" and values.get("long_rows") == "share":
            yield (
                "with train_on_prompt long rows are cut at their end; LLaMA-Factory cuts prompt and answer in "
                "proportion"
            )

    def settle_data(
        self, values: dict[str, Any], names: Mapping[str, str], source: Source, folder: Path
    ) -> list[Mistake]:
        return settle_names(values, names, source, folder)


LLAMA_FACTORY = LlamaFactory()

"""Values of other tools' keys: translates them to offmate's, and merges those of several keys that mean one."""

from __future__ import annotations

from collections.abc import Mapping

from planner.job.lora import ALL_LINEAR
from planner.job.pretraining import TEXTS, check_texts, entries_of
from planner.job.slot_templates import PREFIX, has_slots
from planner.job.source import SWITCHED_OFF, Mistake, Source, shown
from planner.job.trainable import of_axolotl, with_rows
from planner.optimizers.adamw import AdamW
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.muon import Muon
from planner.optimizers.table import OPTIMIZERS

METHODS_NOT_THERE = ("dpo", "orpo", "kto", "grpo", "oft", "llama-adapter")
ADAMW = ("adamw_hf", "adamw_torch_npu_fused", "paged_adamw_32bit", "paged_adamw", "adamw_apex_fused", "adamw")
"""Other names of `adamw_torch`."""
_ADAMW_8BIT = ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_ADAMW_4BIT = "adamw_torch_4bit"
RATES = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale")
"""Keys by which some weights have another learning rate."""
_TRAIN_ON = {True: "all", False: "completions"}
_DTYPES: dict[object, bool | None] = {"bfloat16": True, "bf16": True, "float32": None, "fp32": None, "auto": None}
_SWITCHES = (
    "train_on_inputs",
    "train_on_prompt",
    "use_peft",
    "assistant_only_loss",
    "completion_only_loss",
    "bfloat16",
    "float32",
    "pure_bf16",
    "eager_attention",
    "neat_packing",
    "use_muon",
    "pissa_init",
    "enable_thinking",
)
_FLASH = ("flash_attention", "kernels-", "flex_attention", "xformers", "sage", "fp8", "flash_attn")
_ADDED = {"add_tokens", "add_special_tokens", "new_special_tokens"}
"""LLaMA-Factory's keys, each with a value "a,b"."""
_SPECIAL = ("special_tokens", "tokens")
"""Keys whose mapping names tokens; `tokens` is axolotl's."""
_TEMPLATES = ("chat_template", "template")
METHODS = ("adapter", "finetuning_type", "method")
_STRATEGIES = ("bfd", "wrapped")
_CONFIGS = ("model_config", "overrides_of_model_config")
"""axolotl's keys that change the model's config."""
_ROUTERS, _SHARE = "output_router_logits", "router_aux_loss_coef"
_LONG = {"truncate": "cut", "raise": "refuse"}


def translated(key: str, value: object) -> object:
    """The value in the canonical key's form; None where it asks for nothing."""
    if key == "adapter" and value in SWITCHED_OFF:
        return "full"
    if key in ("train_on_inputs", "train_on_prompt"):
        return _TRAIN_ON.get(bool(value)) if value is not None else None
    if key == "use_peft" and isinstance(value, bool):
        return "lora" if value else "full"
    if key == "assistant_only_loss" and isinstance(value, bool):
        return "answers" if value else "pairs"
    if key == "completion_only_loss" and isinstance(value, bool):
        return "pairs" if value else "all"
    if key in ("dtype", "torch_dtype"):
        return _DTYPES.get(str(value))
    if key in ("bfloat16", "pure_bf16"):
        return True if value else None
    if key == "float32":
        return False if value else None
    if key in METHODS and value == "qlora":
        return "lora"
    if key == "finetuning_type" and value == "freeze":
        return "full"
    if key == "unfrozen_parameters":
        return of_axolotl(value)
    if key == TEXTS:
        return entries_of(value)
    if key == "quantization_bit":
        return True if value in (4, 8) else None
    if key == "lora_target_linear":
        return True if value is True else None
    if key == "peft_init_lora_weights":
        return value or None  # where it is false, axolotl gives peft nothing
    if key == "pissa_init" and isinstance(value, bool):
        return "pissa" if value else None
    if key == "moe_aux_loss_coef":
        return value or None  # the config's own value then
    if key in _CONFIGS and isinstance(value, dict):
        share = value.get(_SHARE)  # null: the config's own value
        return (("auto" if share is None else share) if value.get(_ROUTERS) else 0) if value else None
    if key == "use_muon":
        return Muon.kind if value is True else None
    if key == "eager_attention":
        return "eager" if value else None
    if key == "attn_implementation" and isinstance(value, str) and (value.startswith(_FLASH) or "/" in value):
        return "sdpa"
    if key in ("optim", "optimizer") and value in (*ADAMW, _ADAMW_4BIT):
        return "adamw_torch"
    if key in ("optim", "optimizer") and value in _ADAMW_8BIT:
        return AdamW8bit.kind
    if key == "bf16" and value == "full":
        return True
    if key == "gradient_checkpointing" and isinstance(value, str):
        return True  # axolotl's "unsloth" and "offload"
    if key == "packing_strategy":
        return None  # it has no effect without packing
    if key == "gpu_memory_limit" and isinstance(value, int):
        return f"{value}GB"
    if key == "save_steps" and isinstance(value, float) and value < 1:
        return None
    if key == "train_sampling_strategy":
        return True if value == "group_by_length" else None
    if key == "excess_length_strategy":
        return _LONG.get(str(value), value)
    if key == "eos_token":
        return {"eos_token": value} if value else None
    if key in _SPECIAL and isinstance(value, dict):  # what is padded is never learned
        return {name: token for name, token in value.items() if name != "pad_token" and token} or None
    if key in _TEMPLATES and value == "tokenizer_default":
        return None
    if key == "enable_thinking" and isinstance(value, bool):
        return None if value else {key: value}
    if key == "template" and has_slots(value):
        return f"{PREFIX}{value}"
    return value


def other_optimizer(file: Mapping[str, object]) -> bool:
    """Whether a file names an optimizer that offmate does not have."""
    named = [file[key] for key in ("optim", "optimizer") if file.get(key) not in SWITCHED_OFF]
    return any(translated("optim", value) not in (*OPTIMIZERS,) for value in named)


def done_otherwise(key: str, name: str, value: object) -> str | None:
    """A note on a value that is carried out in another way than it asks for; None where no note is needed."""
    if name == "attn_implementation" and key != "eager_attention" and value not in ("sdpa", "eager", *SWITCHED_OFF):
        return "attention is PyTorch's sdpa, which takes its flash kernel where there is one"
    if name == "save_steps" and isinstance(value, float) and value < 1:
        return "a share of the steps is not taken here, but a number of steps, 500 by itself, beside save_minutes"
    if name == "optim" and value == _ADAMW_4BIT:
        return "AdamW's moments are in fp32 here, or with adamw_8bit in 8 bits"
    if key in _SPECIAL and isinstance(value, dict) and value.get("pad_token"):
        return "padding is never learned, and keeps its token"
    return None


def merged(said: Mapping[str, object]) -> dict[str, object]:
    """Of several keys that mean the same, those that disagree; one where they agree. Keys that ask for nothing give
    way, and some pairs are combined into one value."""
    if "packing_strategy" in said and len(said) == 2:
        packing = next(value for key, value in said.items() if key != "packing_strategy")
        return {"packing": "wrapped" if packing is True and said["packing_strategy"] == "wrapped" else packing}
    lists = [value for value in said.values() if isinstance(value, str)]
    if set(said) <= _ADDED and len(lists) == len(said):
        return {next(iter(said)): ",".join(lists)}
    if set(said) == {"packing", "neat_packing"}:
        return {"packing": bool(said["packing"]) or bool(said["neat_packing"])}
    if set(said) == {"assistant_only_loss", "completion_only_loss"}:
        only = "assistant_only_loss" if said["assistant_only_loss"] else "completion_only_loss"
        of_prompts = said[only] is True and said["completion_only_loss"] is False
        return {only: "all_answers" if of_prompts and only == "assistant_only_loss" else said[only]}
    if set(said) == {"chat_template", "chat_template_jinja"}:
        if said["chat_template_jinja"] and said["chat_template"] in (None, "", "jinja"):
            return {"chat_template_jinja": said["chat_template_jinja"]}
        return {"chat_template": said["chat_template"]}
    if set(said) == {"lora_target_linear", "lora_target_modules"}:  # axolotl adds all linear layers to those named
        linear, named = said["lora_target_linear"] is True, said["lora_target_modules"]
        if not linear or named in SWITCHED_OFF:
            return {"lora_target_linear": True} if linear else {"lora_target_modules": named}
        return {"lora_target_modules": [ALL_LINEAR, *(named if isinstance(named, list) else [named])]}
    if said.get("use_muon") is True:  # LLaMA-Factory then ignores all other names
        return {"use_muon": True}
    asking = {key: value for key, value in said.items() if value not in SWITCHED_OFF}
    found: dict[str, object] = {}
    for key, value in (asking or dict([next(iter(said.items()))])).items():
        new = translated(key, value)
        if new is not None and new not in [translated(*item) for item in found.items()]:
            found[key] = value
    saying = {key: value for key, value in said.items() if translated(key, value) is not None}
    return found or dict([next(iter((saying or said).items()))])


def check_optimizer(values: Mapping[str, object], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Mistakes of optimizer states that cannot be on disk, and of learning rates that exclude one another."""
    apart = [key for key in RATES if values.get(key) not in SWITCHED_OFF]
    if apart and values.get("decay_all") is True:
        text = f"{names[apart[0]]} says which weights decay; leave one of the two out"
        return [source.mistake(names["decay_all"], "bad-value", text)]
    optimizer = OPTIMIZERS.get(str(values.get("optim")), AdamW)
    if apart and optimizer.one_rate:
        text = f"optim is {optimizer.kind}, under which all weights have learning_rate; leave one of the two out"
        return [source.mistake(names[apart[0]], "not-there", text)]
    if len(apart) > 1:
        both = "both say at which rate some weights are trained, and which these are"
        text = f"{names[apart[1]]} is given too, and {both}; keep one"
        return [source.mistake(names[apart[0]], "bad-value", text)]
    if optimizer.on_disk or not values.get("disk_paths"):
        return []
    text = f"disk_paths are given too, and {optimizer.states} stay in memory: use adamw_torch, or leave disk_paths out"
    return [source.mistake(names["optim"], "bad-value", text)]


def check_value(key: str, name: str, value: object, source: Source) -> list[Mistake]:
    """Mistakes in values whose meaning depends on the name of their key in the file, or that are known by name."""
    if key == "warmup_ratio" and value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1):
        return [source.mistake(key, "bad-value", f"it is {shown(value)}; it must be a share of all steps, below 1")]
    if key == TEXTS:
        return check_texts(value, source)
    if key in _SWITCHES and (value is not None or key == "enable_thinking") and not isinstance(value, bool):
        return [source.mistake(key, "wrong-type", f"it is {shown(value)}; it must be true or false")]
    if name == "warmup_steps" and isinstance(value, float) and value >= 1 and not value.is_integer():
        return [source.mistake(key, "bad-value", f"it is {shown(value)}; 1 or more must be a whole number of steps")]
    if name == "method" and value in METHODS_NOT_THERE:
        return [source.mistake(key, "not-there", f"{value} is not there yet; offmate does full fine-tuning and LoRA")]
    if key == "unfrozen_parameters" and (rows := with_rows(value)):
        text = f"it has {shown(rows)}, and training some rows of a weight is not there yet; name the weight"
        return [source.mistake(key, "not-there", text)]
    if key in ("dtype", "torch_dtype") and value not in SWITCHED_OFF and str(value) not in _DTYPES:
        text = f"it is {shown(value)}; bf16: true computes in bf16 with fp32 masters, without it all is fp32"
        return [source.mistake(key, "not-there", text)]
    if key == "quantization_bit" and value not in (4, 8, *SWITCHED_OFF):
        text = f"it is {shown(value)}; a base in 4 or 8 bits is there, and no other yet"
        return [source.mistake(key, "not-there", text)]
    if key in _CONFIGS and value not in SWITCHED_OFF:
        asks = value if isinstance(value, dict) else {shown(value): None}
        if other := [name for name in asks if name not in (_ROUTERS, _SHARE)]:
            text = f"it has {other[0]}; a changed model is not there yet (change its config.json)"
            return [source.mistake(key, "not-there", text)]
        if not isinstance(asks.get(_ROUTERS), bool):
            text = f"{_SHARE} counts beside {_ROUTERS}: true or false; give that, too"
            return [source.mistake(key, "bad-value", text)]
    if key == "train_sampling_strategy" and value not in ("random", "group_by_length", *SWITCHED_OFF):
        text = f"it is {shown(value)}; the order is random, or has rows of like length together (group_by_length)"
        return [source.mistake(key, "not-there", text)]
    if key == "packing_strategy" and value not in (*_STRATEGIES, *SWITCHED_OFF):
        text = f"it is {shown(value)}; documents are packed whole (bfd), or cut (wrapped)"
        return [source.mistake(key, "not-there", text)]
    if key == "chat_template" and isinstance(value, str) and value.startswith("tokenizer_default_fallback_"):
        text = f"a template for a tokenizer without one is not there yet; give {value[27:]}, or leave this key out"
        return [source.mistake(key, "not-there", text)]
    return []

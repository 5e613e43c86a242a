"""The tools whose job files offmate reads, and the names of a job's keys in them.

A new tool is one file with a `Tool`, its place in `TOOLS`, and its word in `offmated/cli/keys.py` (a test asks for it).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from planner.importers.axolotl import AXOLOTL
from planner.importers.base import Meaning, Table, Tool
from planner.importers.llama_factory import LLAMA_FACTORY
from planner.importers.transformers import BEGINNINGS, OWN
from planner.importers.trl import PREFERENCES, TRL

TOOLS: tuple[Tool, ...] = (AXOLOTL, LLAMA_FACTORY, TRL)
"""In the order in which a file is tried: a file that shows no keys of LLaMA-Factory alone may be TRL's."""

_TELLING = "beta num_generations reward_funcs reward_model_path max_prompt_length max_completion_length"
_OF_TRL_ALONE = PREFERENCES.keys() - {*_TELLING.split()}
ANY: Table = {
    **{key: meaning for key, meaning in TRL.keys.items() if key not in _OF_TRL_ALONE},
    **LLAMA_FACTORY.keys,
    **AXOLOTL.keys,
}
"""The keys of all tools, for files whose keys show no tool. Where tools differ, axolotl's meaning counts."""


def tool_of(keys: Collection[str]) -> Tool:
    """The tool for which a file with these keys is; `OWN` for offmate itself."""
    return next((tool for tool in TOOLS if tool.shows(keys)), OWN)


def meaning_of(key: str, tool: Tool, names: Mapping[str, str]) -> Meaning | None:
    """What becomes of a key in a file for `tool`; None for an unknown key. `names`: every name that a key of offmate's
    has anywhere -> the key."""
    if key in tool.keys:
        return tool.keys[key]
    if key in names:
        return Meaning(kind="honoured", text=names[key])
    why = next((why for start, why in BEGINNINGS.items() if key.startswith(start)), None)
    return ANY.get(key) or (Meaning(kind="unused", text=why) if why else None)


def other_name(tool: Tool, key: str, name: str) -> str | None:
    """The tool's key for the job's key `name`, where `key` is a name of it elsewhere and means something else in this
    tool. None where `key` means `name` here, too, or where the tool has no key for it."""
    if key not in tool.keys or tool.keys[key].kind == "honoured":
        return None
    named = (other for other, meaning in tool.keys.items() if meaning.kind == "honoured" and meaning.text == name)
    return next(named, None)


PARTS = (
    "dataset_config",
    "dataset_train_split",
    "dataset_text_field",
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "cosine_min_lr_ratio",
    "eot_tokens",
    "rl",
    "reward_model",
    "trl",
    "dpo_loss_type",
    "dpo_loss_weights",
    "pref_loss",
    "pref_ftx",
    "loss_type",
    "loss_weights",
    "label_smoothing",
)
"""Keys without one of offmate's: they say more about another key, or say it in a form of the tool's own.
`planner.importers.read.settle_data` reads those of the data, `planner.keys.schedules` the schedule's."""


def _other_names() -> dict[str, tuple[str, ...]]:
    names: dict[str, dict[str, None]] = {}
    for tool in TOOLS:
        for key, meaning in tool.keys.items():
            if meaning.kind == "honoured" and meaning.text != key and key not in PARTS:
                names.setdefault(meaning.text, {})[key] = None
    for name, more in (("tokenizer", "tokenizer_name_or_path"), ("num_train_epochs", "epochs")):
        names.setdefault(name, {})[more] = None
    return {name: tuple(keys) for name, keys in names.items()}


ALIASES = _other_names()
"""offmate's key -> its names in other tools."""

SHORT = {
    "lr": "learning_rate",
    "bs": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "steps": "max_steps",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "label_smoothing": "label_smoothing_factor",
    "scheduler": "lr_scheduler_type",
    "seq_len": "max_length",
    "seq_length": "max_length",
    "context": "max_length",
    "data": "dataset",
    "output": "output_dir",
    "r": "lora_r",
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "lora": "method",
    "lsp": "method",
}
"""Everyday names of keys, which no tool has -> the key that the error suggests."""

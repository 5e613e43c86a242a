"""Rewrites another tool's job file in offmate's keys, with a comment on each key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1, V1, is_v1
from planner.importers.templates import named_template
from planner.importers.tools import tool_of
from planner.job.schema import CANONICAL, Job
from planner.keys.source import SWITCHED_OFF, read_yaml

_RENAMED = "in offmate's names: "
_READ_FROM = {
    "trainable": ("freeze_trainable_modules", "freeze_extra_modules", "peft_config"),
    "trainable_layers": ("freeze_trainable_layers", "peft_config"),
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora"), ("peft_config",)),
    **dict.fromkeys(("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"), ("optim_config",)),
    "packing": ("stage",),
    "preference": ("stage",),
    "sft_weight": ("loss_type", "dpo_loss_type"),
    "ref_model": ("adapter_name_or_path",),
    "add_tokens": ("special_tokens",),
    "lr_scheduler_type": ("cosine_min_lr_ratio",),
    "special_tokens": ("template", "tokens"),
    "load_best_model_at_end": ("saves_per_epoch", "save_steps", "evals_per_epoch", "eval_steps"),
}
"""Key -> the tools' keys from which its value may come although they are no other names of it."""


def imported(text: str, folder: Path, name: str) -> str:
    """Return an offmate job file that means the same as the YAML `text` for another tool and writes out that tool's
    defaults. `folder`: where relative paths start; `name`: the file's name in errors. Raises UserError for what cannot
    be run as it is written."""
    job, notes = Job.parse_with_notes(text, folder, name=name)
    source = read_yaml(text, name)
    known = tool_of(source.values)
    tool, table = (V1, LLAMA_FACTORY_V1) if is_v1(source.values) else (known.name, known.keys)
    file_keys = {CANONICAL.get(key, key): key for key in source.values if key in CANONICAL}
    for key in source.values:  # a tool's own meaning of a name comes before all others
        meaning = table.get(key)
        if meaning is not None and meaning.kind == "honoured" and meaning.text in Job.model_fields:
            file_keys.setdefault(meaning.text, key)
    values = job.model_dump(mode="json", exclude_defaults=False)
    whose = tool if tool == V1 else f"{tool}'s"
    lines = [f"# {name}, a file of {whose}, in offmate's words." if tool else f"# {name}, in offmate's words."]
    for key in Job.model_fields:
        if key not in job.model_fields_set or (key == "tokenizer" and job.tokenizer == job.model):
            continue
        file_key = file_keys.get(key)
        value = _plain(key, values[key], source.values.get(file_key) if file_key else None)
        comments = (_comment(key, file_key or _read_from(key, source.values), tool), _unused(value))
        lines.append(_line(key, value, "; ".join(filter(None, comments))))
    kept_notes = [note for note in notes if not note.startswith((_RENAMED, "the file reads as"))]
    lines += ["", *(f"# {note}" for note in kept_notes)] if kept_notes else []
    return "\n".join(lines) + "\n"


def _read_from(key: str, file: Mapping[str, object]) -> str | None:
    return ", ".join(name for name in _READ_FROM.get(key, ()) if file.get(name) not in SWITCHED_OFF) or None


def _comment(key: str, file_key: str | None, tool: str) -> str:
    if file_key is None:
        return f"what {tool} does where nothing is said" if tool else "what follows from the other keys"
    return "" if file_key == key else f"{file_key} in the file"


def _unused(value: object) -> str:
    """A comment on the names '' in the value of `dataset` or `eval_dataset`; "" where there are none."""
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    names = [name for entry in entries for key in ("columns", "message_keys") for name in entry.get(key, {}).values()]
    return "'': not used" if "" in names else ""


def _plain(key: str, value: Any, written: object) -> Any:
    """Return a key's value as people write it: a template by its name, a dataset without fields that are not set."""
    if key == "chat_template" and isinstance(written, str) and named_template(written) == value is not None:
        return written
    if key == "bf16" and written in (None, "auto"):
        return "auto" if value else value
    if key in ("dataset", "eval_dataset") and value is not None:
        entries = [_said(entry) if isinstance(entry, dict) else entry for entry in value]
        return entries[0] if len(entries) == 1 and isinstance(entries[0], str) else entries
    return value


def _said(entry: dict[str, Any]) -> dict[str, Any]:
    silent: tuple[object, ...] = (None, [], {}, False, "train")
    return {key: value for key, value in entry.items() if value not in silent or (key, value) == ("roles_to_train", [])}


def _line(key: str, value: object, comment: str) -> str:
    text = yaml.safe_dump({key: value}, allow_unicode=True, sort_keys=False, width=10_000).rstrip("\n")
    if not comment:
        return text
    return f"# {comment}\n{text}" if "\n" in text else f"{text}  # {comment}"

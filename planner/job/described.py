"""Describes every key of a job for people: its type in words, its default, its other names and its text.

The texts are the strings below the fields, in the source of the classes that `Job` and `DataEntry` consist of. Python
does not keep these strings, so they are read from the source, and only where someone asks for them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from planner.data.entry import DataEntry
from planner.data.job_keys import DataKeys, EvaluationKeys, RowKeys
from planner.importers.tools import ALIASES
from planner.keys.adapter_keys import EmbeddingRateKeys, LoraKeys, MethodKeys, QuantizedKeys
from planner.keys.base import Keys
from planner.keys.loss_keys import LossKeys
from planner.keys.lsp import LspKeys
from planner.keys.memory_keys import MemoryKeys
from planner.keys.model_keys import ModelKeys, NumberKeys
from planner.keys.output_keys import OutputKeys, ReportKeys, ScheduleKeys
from planner.keys.preference import PreferenceKeys
from planner.keys.training_keys import OptimizerKeys, StepKeys

_SECTIONS: Mapping[str, type[Keys]] = {
    "Model and tokenizer": ModelKeys,
    "Method": MethodKeys,
    "LoRA": LoraKeys,
    "A base in 4 or 8 bits": QuantizedKeys,
    "LSP": LspKeys,
    "Data": DataKeys,
    "What is learned": RowKeys,
    "Batch size, learning rate and length": StepKeys,
    "Learning rate of embeddings": EmbeddingRateKeys,
    "Optimizer": OptimizerKeys,
    "Loss and noise": LossKeys,
    "Preferences": PreferenceKeys,
    "Precision and seed": NumberKeys,
    "Evaluation": EvaluationKeys,
    "Memory and drives": MemoryKeys,
    "Checkpoints and the trained model": OutputKeys,
    "Run name and trackers": ReportKeys,
    "Schedule": ScheduleKeys,
}
"""The title of a section -> the class with its keys, in the order in which people read them."""

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer": "the same as model",
        "report_to": "none",
        "bf16": "true if the card computes in bf16",
        "lora_r": "16",
        "lora_alpha": "32",
        "lora_dropout": "0.05",
        "lora_target_modules": "all-linear",
    }
)
"""Key -> its default, as YAML or in words, where the field's own default is not what a file without the key gets."""

_ENTRY_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "columns": ("field", "field_messages", "field_tools", "text_column"),
        "message_keys": (
            "message_property_mappings",
            "message_field_role",
            "message_field_content",
            "message_field_training",
            "field_thinking",
        ),
        "drop_system": ("drop_system_message",),
    }
)
"""Key of an entry of `dataset` -> axolotl's names for it or for a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key, for people. `type` says in words what its value must be, and `default` what a file without it gets, as
    YAML or in words; None: it is required. `aliases`: its names in other tools. `text`: one to four sentences in
    Markdown, whose links start at the page docs/reference/keys.md."""

    name: str
    type: str
    default: str | None
    aliases: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Keys about one theme. `text` is its introduction, a sentence in Markdown."""

    title: str
    text: str
    keys: tuple[Key, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Return all keys of a job file by theme, in the order in which people read them."""
    return tuple(_section(title, keys, ALIASES, DEFAULTS) for title, keys in _SECTIONS.items())


@cache
def entry_section() -> Section:
    """Return the keys of a mapping in `dataset` or `eval_dataset`."""
    return _section("Entries of dataset", DataEntry, _ENTRY_ALIASES, {})


def plain(text: str) -> str:
    """Return the Markdown `text` with the words of its links alone, for a terminal."""
    return re.sub(r"\[([^\[\]]+)\]\([^()\s]+\)", r"\1", text)


def first_sentence(text: str) -> str:
    """Return the first sentence of `text`, with its full stop."""
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _section(
    title: str, model: type[BaseModel], aliases: Mapping[str, tuple[str, ...]], defaults: Mapping[str, str]
) -> Section:
    texts = _texts(model)
    keys = tuple(
        Key(
            name=name,
            type=field.description or "",
            default=defaults.get(name) or _default(field),
            aliases=aliases.get(name, ()),
            text=texts.get(name, ""),
        )
        for name, field in model.model_fields.items()
    )
    return Section(title=title, text=_joined(model.__doc__ or ""), keys=keys)


def _default(field: FieldInfo) -> str | None:
    """Return a field's default as YAML on one line; None where it is required."""
    if field.is_required():
        return None
    value: Any = [*field.default] if isinstance(field.default, tuple) else field.default
    return str(yaml.safe_dump(value, default_flow_style=True)).splitlines()[0]  # without the mark of the end, "..."


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field of a class: field -> text."""
    tree = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[field.target.id] = _joined(value.value)
    return texts


def _joined(text: str) -> str:
    return " ".join(text.split())

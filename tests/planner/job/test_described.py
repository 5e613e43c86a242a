"""What people are told about each key: it is complete, short, and what the code does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

from planner.data.entry import DataEntry, PromptFormat
from planner.importers.axolotl_data import DATASET_TYPES, read_entry
from planner.importers.llama_factory_v1 import LLAMA_FACTORY_V1
from planner.importers.tools import ALIASES, ANY
from planner.job.described import DEFAULTS, Key, Section, entry_section, first_sentence, plain, sections
from planner.job.schema import CANONICAL, Job
from planner.keys.lora import DEFAULTS as LORA_DEFAULTS

ALL = [(section, key) for section in (*sections(), entry_section()) for key in section.keys]
WORDS = re.compile(r"[\w.-]+")
OF_OTHERS = """adamw_bnb_8bit adamw_torch_8bit begin_of_solution begin_of_thought bos_token create_loraplus_optimizer
    down_proj embed_tokens gate_up_proj lm_head lora_ga loraplus_weight_decay min_lr_rate no_input_format num_cycles
    output_router_logits paged_adamw_8bit q_proj reasoning_content system_format system_prompt target_parameters
    template_thinking_key tokenizer_default unk_token v_proj"""
"""Names that texts take from models, peft, transformers and axolotl, or other names of values."""
IN_WORDS = {"bf16": {"auto"}, "eval_strategy": {"no"}}
"""Key -> values that a file may have besides those of the key's type: they are settled when the file is read."""


def ends(text: str) -> int:
    """The number of sentences in a text: full stops before a space or the end, outside of code."""
    return len(re.findall(r"\.(?=\s|$)", re.sub(r"`[^`]*`", "code", text)))


def choices(kind: Any) -> Iterator[object]:
    """The values that a type names, also within a union or a list."""
    if get_origin(kind) is Literal:
        yield from get_args(kind)
    elif kind is bool:
        yield from (True, False)
    elif get_origin(kind) in (Annotated, tuple, Union, UnionType):
        for part in get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind):
            yield from choices(part)


def in_yaml(value: object) -> str:
    return str(yaml.safe_dump(value)).splitlines()[0].strip("'")


def test_each_key_of_a_job_is_in_one_section() -> None:
    names = [key.name for section in sections() for key in section.keys]
    assert sorted(names) == sorted(Job.model_fields)
    assert [key.name for key in entry_section().keys] == list(DataEntry.model_fields)


@pytest.mark.parametrize(("section", "key"), ALL, ids=[f"{section.title}-{key.name}" for section, key in ALL])
def test_a_key_has_a_type_and_one_to_four_sentences(section: Section, key: Key) -> None:
    assert key.type
    assert key.text.endswith(".") and 1 <= ends(key.text) <= 4, key.text
    assert key.text.count("`") % 2 == 0
    assert key.text.startswith(first_sentence(key.text)) and first_sentence(key.text).endswith(".")


@pytest.mark.parametrize("section", [*sections(), entry_section()], ids=lambda section: section.title)
def test_a_section_begins_with_one_sentence(section: Section) -> None:
    assert section.text.endswith(".") and ends(section.text) == 1


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model in (Job, DataEntry) for name in model.model_fields]
)
def test_the_choices_that_a_type_names_are_those_of_the_field(model: type[BaseModel], name: str) -> None:
    field = model.model_fields[name]
    named = {word.strip(".") for word in WORDS.findall(field.description or "")}
    values = {in_yaml(value) for value in choices(field.annotation)}
    assert values <= named, "a choice is not named"
    every_word_is_a_choice = not any(" " in part for part in re.split(", | or ", field.description or ""))
    if values and every_word_is_a_choice:
        assert named - {"null", "or"} - IN_WORDS.get(name, set()) == values


def test_a_default_reads_as_the_fields_own() -> None:
    for section, key in ALL:
        model = DataEntry if section == entry_section() else Job
        field = model.model_fields[key.name]
        if model is Job and key.name in DEFAULTS:
            assert key.default == DEFAULTS[key.name]
        elif field.is_required():
            assert key.default is None
        else:
            value = yaml.safe_load(str(key.default))
            assert (tuple(value) if isinstance(value, list) else value) == field.default, key.name


def test_defaults_of_lora_are_those_that_a_job_gets() -> None:
    told = {key.name: yaml.safe_load(str(key.default)) for _, key in ALL if key.name in LORA_DEFAULTS}
    assert told == LORA_DEFAULTS


def test_names_in_other_tools_lead_to_their_key() -> None:
    for section in sections():
        for key in section.keys:
            assert key.aliases == ALIASES.get(key.name, ())
            assert all(CANONICAL[alias] == key.name for alias in key.aliases)


def test_the_other_names_of_an_entrys_keys_are_read() -> None:
    values = {"drop_system_message": True, "message_property_mappings": {"role": "speaker"}}
    for key in entry_section().keys:
        for alias in key.aliases:
            (entry,) = read_entry({"path": "owner/set", alias: values.get(alias, "other")}, find=str)
            assert isinstance(entry, DataEntry) and getattr(entry, key.name), alias


def test_all_types_of_an_entry_are_told() -> None:
    key = next(key for key in entry_section().keys if key.name == "type")
    told = {*WORDS.findall(key.type), *WORDS.findall(key.text)}
    assert {*DATASET_TYPES} <= told


def test_every_name_of_a_key_in_a_text_is_one() -> None:
    known = {*CANONICAL, *DataEntry.model_fields, *ANY, *LLAMA_FACTORY_V1, *PromptFormat.model_fields, *DATASET_TYPES}
    known |= {alias for key in entry_section().keys for alias in key.aliases}
    known |= {value for _, key in ALL for value in WORDS.findall(key.type)}
    code = " ".join(found for _, key in ALL for found in re.findall(r"`([^`]*)`", key.text))
    assert {*re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", code)} - known == {*OF_OTHERS.split()}


def test_a_link_is_its_words_in_a_terminal() -> None:
    assert plain("see [how](../how-to/lsp.md), `[a, b]` and ([more](data.md#x)).") == "see how, `[a, b]` and (more)."
    assert first_sentence("At 0.9 it stops. Then more.") == "At 0.9 it stops."

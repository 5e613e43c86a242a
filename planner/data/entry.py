"""An entry of a job's `dataset`: where its records are, which of them count, and what their columns mean. Light: no
torch."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from planner.data.json_values import json_in
from planner.data.records import Kind, Record, role_of
from planner.keys.fields import VALUES, Count, Text, Values
from planner.keys.source import shown

_VALUE = ConfigDict(extra="forbid", frozen=True)
_PLACES = re.compile(r"\{(system|input|instruction)\}")
Type = Literal["text", "messages", "prompt", "instructions", "segments", "tokens"]
_KINDS: dict[Type, Kind] = {
    "text": "text",
    "messages": "messages",
    "prompt": "prompt",
    "instructions": "alpaca",
    "segments": "segments",
    "tokens": "tokens",
}
COLUMNS: dict[Type, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instructions": ("instruction", "output"),
    "segments": ("segments",),
    "tokens": ("input_ids",),
}
"""Type -> the columns that it must have, by offmate's names."""


_LATER = (
    "data_dir",
    "max_samples",
    "roles_to_train",
    "train_on_eos",
    "train_on_eot",
    "eot_tokens",
    "chat_template_kwargs",
    "split_thinking",
    "formatting",
    "converter",
    "draw",
)
"""Fields that were added later. They are not written where they say nothing."""


class PromptFormat(BaseModel):
    """How an instruction is written without a chat template. `with_input`, `without_input`: the text before the answer,
    for records with and without an input, with `{instruction}`, `{input}` and `{system}` for the columns. `system`: the
    system text of a record that has none."""

    model_config = _VALUE

    with_input: str
    without_input: str
    system: str = ""

    def written(self, instruction: str, more: str, system: str) -> str:
        """The prompt of a record with this instruction, input (`more`) and system text."""
        texts = {"system": system or self.system, "input": more, "instruction": instruction}
        # One pass: a `{input}` in a record's own text is not replaced.
        return _PLACES.sub(lambda place: texts[place[1]], self.with_input if more else self.without_input)


_ALPACA = (
    "Below is an instruction that describes a task{more}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{{instruction}}\n\n"
)


ALPACA = {
    "with_input": _ALPACA.format(more=", paired with an input that provides further context")
    + "### Input:\n{input}\n\n### Response:\n",
    "without_input": _ALPACA.format(more="") + "### Response:\n",
}
"""The prompt format of the Alpaca data."""


EndMarks = Literal["turn", "all", "last", "none"]
"""Which end marks are learned: those behind learned turns, behind all turns, the last one, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTurns:
    """Which turns of a conversation are learned, by axolotl's rules: their texts, and the end marks behind them.

    `roles`: the roles whose turns are learned where a turn itself says nothing; None: all. `eos`: which of the
    tokenizer's end tokens are learned. `eot`: which of `marks` are, tokens that end a turn; without `marks` the
    tokenizer's end token ends it.
    """

    roles: frozenset[str] | None
    eos: EndMarks = "turn"
    eot: EndMarks = "turn"
    marks: tuple[str, ...] = ()


Formatting = Literal["alpaca", "sharegpt", "openai"]
"""How LLaMA-Factory reads a dataset, as its dataset_info.json says."""

Converter = Literal["v1", "alpaca", "sharegpt"]
"""How LLaMA-Factory's v1 reads the records of a dataset; `v1`: records in its own form."""


class Draw(BaseModel):
    """Which rows of an entry LLaMA-Factory's v1 takes: it draws `size` rows from all, then `weight` times as many from
    these. A row may be drawn several times. Python's random generator draws them under `seed`, after `skip` other
    numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    size: Count | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    skip: Annotated[int, Field(ge=0, le=10**9)] = 0

    def times(self, rows: int) -> Counter[int]:
        """How often each of `rows` rows, counted from 0, is taken."""
        generator = random.Random(self.seed)
        for _ in range(self.skip):
            generator.random()
        taken: Sequence[int] = range(rows)
        if self.size is not None and rows:
            taken = generator.choices(taken, k=self.size)
        if self.weight is not None and taken:
            taken = generator.choices(taken, k=int(len(taken) * self.weight))
        return Counter(taken)


class DataEntry(BaseModel):
    """Records of one file, folder or dataset of the hub.

    `columns`: offmate's name of a column -> the data's name, "" for a column that is not used. `message_keys`: the same
    for the keys of a message. `roles`: a role in the data -> the role that it means. `type` None: the columns show the
    kind. `max_samples`: only the first so many records count. `roles_to_train` (roles by the data's names),
    `train_on_eos`, `train_on_eot`, `eot_tokens`: see `learned`; all None where the chat template says what is learned.
    `chat_template_kwargs`: added to the job's, and preferred to them. `split_thinking`: the key of a message that gets
    the thoughts in an answer (`planner.data.entry`). `formatting`: records are read as LLaMA-Factory reads data of
    this formatting, and roles missing in `roles` are invalid. `converter`: records are read, and rows written, as in
    LLaMA-Factory's v1 (`planner.importers.llama_factory_v1_records`). `draw`: which of these rows v1 takes.
    """

    model_config = _VALUE

    path: Text
    name: Text | None = None
    split: Annotated[str, Field(pattern=r"^[\w.-]+(\[[^\[\]]*\])?(\+[\w.-]+(\[[^\[\]]*\])?)*$")] = "train"
    data_files: tuple[Text, ...] = ()
    data_dir: Text | None = None
    revision: Text | None = None
    type: Type | None = None
    columns: dict[str, str] = {}
    message_keys: dict[str, str] = {}
    roles: dict[str, str] = {}
    prompt_format: PromptFormat | None = None
    max_samples: Count | None = None
    drop_system: bool = False
    roles_to_train: tuple[Text, ...] | None = None
    train_on_eos: EndMarks | None = None
    train_on_eot: EndMarks | None = None
    eot_tokens: tuple[Text, ...] | None = None
    chat_template_kwargs: Values = None
    split_thinking: Text | None = None
    formatting: Formatting | None = None
    converter: Converter | None = None
    draw: Draw | None = None

    @model_serializer(mode="wrap")
    def _as_before(self, others: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the later fields where they say nothing: so checkpoints from before these fields existed name an
        equal entry."""
        fields: dict[str, Any] = others(self)
        return {key: value for key, value in fields.items() if key not in _LATER or value is not None}

    @property
    def learned(self) -> LearnedTurns | None:
        """Which turns are learned; None: those of the assistant that the chat template marks."""
        if all(
            setting is None for setting in (self.roles_to_train, self.train_on_eos, self.train_on_eot, self.eot_tokens)
        ):
            return None
        named = ("assistant",) if self.roles_to_train is None else self.roles_to_train
        roles = {role for name in named if (role := role_of(self.roles.get(name, name))) is not None}
        eos = self.train_on_eos or "turn"
        return LearnedTurns(roles=frozenset(roles), eos=eos, eot=self.train_on_eot or eos, marks=self.eot_tokens or ())

    @property
    def kind(self) -> Kind | None:
        """The kind of its records; None where the columns show it."""
        return _KINDS[self.type] if self.type is not None else None

    def most(self, of_job: int | None) -> int | None:
        """The most of its records that count, in a job with `max_samples: of_job`; None: all."""
        return min((most for most in (self.max_samples, of_job) if most is not None), default=None)

    @property
    def whole(self) -> bool:
        """Whether the entry means all its records, not a part of a split."""
        return self.split == "train"

    def names(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """The columns of the data by offmate's names. Raises ValueError where a column is missing that the entry
        needs."""
        needed = {self.columns.get(column, column) for column in (COLUMNS[self.type] if self.type else ())}
        optional = {"input", "system", "tools", "history", VALUES}  # data may lack these
        needed |= {theirs for ours, theirs in self.columns.items() if theirs and ours not in optional}
        if columns and (missing := sorted(needed - set(columns))):
            raise ValueError(f"there is no column {missing[0]}; found: {', '.join(columns)}")
        taken = set(self.columns.values())
        ours = [name for name, theirs in self.columns.items() if theirs in columns]
        return (*ours, *(column for column in columns if column not in taken and column not in self.columns))

    def mapped(self, record: Record) -> Record:
        """The record under offmate's names. Raises ValueError for messages that cannot be read."""
        of_axolotl = self.learned is not None
        renamed = self.columns or self.message_keys or self.roles or self.drop_system or self.split_thinking
        if not (renamed or of_axolotl):
            return record
        taken = set(self.columns.values())
        fields = {key: value for key, value in record.items() if key not in taken and key not in self.columns}
        fields |= {ours: record[theirs] for ours, theirs in self.columns.items() if theirs in record}
        fields = as_axolotl(fields) if of_axolotl else fields
        for column in ("messages", "conversations", "prompt", "completion"):
            if isinstance(listed := fields.get(column), list):
                messages = [self._message(message) for message in listed]
                messages = [*map(with_arguments, messages)] if of_axolotl else messages
                fields[column] = messages[self.drop_system and messages != [] and _is_system(messages[0]) :]
        return fields

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message  # its reader reports what is wrong
        taken = set(self.message_keys.values())
        fields = {key: value for key, value in message.items() if key not in taken and key not in self.message_keys}
        fields |= {ours: message[theirs] for ours, theirs in self.message_keys.items() if theirs in message}
        named = fields.get("role") or fields.get("from")
        if isinstance(named, str) and named in self.roles:
            fields.pop("from", None)
            fields["role"] = self.roles[named]
        elif self.formatting is not None and self.roles:
            fields["role"] = f"no tag: {named}"
        return fields if self.split_thinking is None else with_thinking(fields, self.split_thinking)


def _is_system(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def as_entry(value: str | DataEntry) -> DataEntry:
    """The value as an entry, also where it is only a path."""
    return value if isinstance(value, DataEntry) else DataEntry(path=value)


def simplest(values: Mapping[str, Any]) -> str | DataEntry:
    """The entry with these fields, or only its path where no other field is set. Raises pydantic's ValidationError."""
    entry = DataEntry.model_validate(dict(values))
    return entry.path if entry == DataEntry(path=entry.path) else entry


# ---- reads conversations as axolotl does, from any file: nulls count as absent, and texts that are to be JSON are
# parsed


_COLUMNS = ("messages", "conversations", "tools")


def as_axolotl(record: dict[str, Any]) -> dict[str, Any]:
    """A record with offmate's names, without keys that are null. Where messages, tools or a tool's parameters are
    texts, they are parsed as JSON, whose nulls stay. Raises ValueError."""
    cleaned: dict[str, Any] = _without_nulls(record)
    for column in _COLUMNS:
        _read_in(cleaned, column, column)
    for tool in _objects(cleaned.get("tools")):
        _read_in(tool.get("function"), "parameters", "parameters of a tool")
    return cleaned


def with_arguments(message: Any) -> Any:
    """A message of such a record, with offmate's names. Its calls' arguments that are texts are parsed as JSON, so that
    a template writes them its own way. Raises ValueError."""
    for call in _objects(message.get("tool_calls") if isinstance(message, dict) else None):
        _read_in(call.get("function"), "arguments", "arguments of a call")
    return message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(its) for key, its in value.items() if its is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _read_in(place: Any, key: str, what: str) -> None:
    """Replace a text under a key by the JSON value in it."""
    if isinstance(place, dict) and isinstance(text := place.get(key), str):
        try:
            place[key] = json_in(text)
        except ValueError as error:
            raise ValueError(f"axolotl reads {what} as JSON, and {shown(text, 80)} {error}") from None


# ---- splits answers that begin with the assistant's thoughts into thoughts and answer: axolotl's `split_thinking`


_THOUGHTS = (
    ("<think>", "</think>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
_SOLUTION = ("<|begin_of_solution|>", "<|end_of_solution|>")


def with_thinking(message: dict[str, Any], key: str) -> dict[str, Any]:
    """The message. In an answer of the assistant's, the text between the marks of thoughts goes under `key`, stripped;
    the content becomes the text behind it, or the solution in that text. Raises ValueError where words would be lost,
    which axolotl drops silently."""
    name = "content" if message.get("content") is not None else "value"
    content = message.get(name)
    if role_of(str(message.get("role") or message.get("from"))) != "assistant" or not isinstance(content, str):
        return message
    begin, end = next((marks for marks in _THOUGHTS if marks[0] in content and marks[1] in content), ("", ""))
    if not begin:
        return message
    before, _, behind = content.partition(begin)
    thought, ended, answer = behind.partition(end)
    answer = answer.lstrip()
    lost = [before]
    if all(mark in answer for mark in _SOLUTION):
        before, _, behind = answer.partition(_SOLUTION[0])
        answer, closed, behind = behind.partition(_SOLUTION[1])
        ended, lost, answer = ended and closed, [*lost, before, behind], answer.strip()
    if not ended:
        turned = f"an answer has {end} before {begin}, or a solution that ends before it begins"
        raise ValueError(f"{turned}: {shown(content, 80)}")
    if words := next((words.strip() for words in lost if words.strip()), None):
        raise ValueError(f"split_thinking leaves out {shown(words, 80)}, which stands outside of thought and solution")
    return {**message, key: thought.strip(), name: answer}

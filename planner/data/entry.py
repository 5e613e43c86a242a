"""An entry of a job's `dataset`: where its records are, which of them are used, and what their columns mean. Does not
import torch."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from planner.data.json_values import json_in
from planner.data.pair_format import SIDES, PairFormat
from planner.data.records import Kind, Record, role_of
from planner.keys.fields import VALUES, Count, Text, Values
from planner.keys.source import shown

_VALUE = ConfigDict(extra="forbid", frozen=True)
_PLACES = re.compile(r"\{(system|input|instruction)\}")
Type = Literal["text", "messages", "prompt", "instructions", "segments", "tokens", "preference", "unpaired"]
_KINDS: dict[Type, Kind] = {
    "text": "text",
    "messages": "messages",
    "prompt": "prompt",
    "instructions": "alpaca",
    "segments": "segments",
    "tokens": "tokens",
    "preference": "preference",
    "unpaired": "unpaired",
}
COLUMNS: dict[Type, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instructions": ("instruction", "output"),
    "segments": ("segments",),
    "tokens": ("input_ids",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
"""Value of `type` in an entry -> the columns that its records must have, by offmate's names."""
_UNPAIRED = {"alpaca": ("output", "label"), "sharegpt": ("messages", "label"), "openai": ("messages", "label")}
"""Value of `formatting` -> the columns of unpaired answers as LLaMA-Factory has them."""


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
    "pair_format",
)
"""Fields that did not exist in the first version. They are written only where they are set."""


class PromptFormat(BaseModel):
    """The text that turns an instruction into a prompt where no chat template is used.

    `with_input` and `without_input` are the texts before the answer, for records with and without the column `input`.
    In them `{instruction}`, `{input}` and `{system}` stand for the record's columns. `system` is the system text of a
    record that has none.
    """

    model_config = _VALUE

    with_input: str
    without_input: str
    system: str = ""

    def written(self, instruction: str, more: str, system: str) -> str:
        """Return the prompt of one record in this format. `instruction`, `more` and `system` are the texts of its
        columns instruction, input and system, "" where it has none."""
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
"""The prompt format of Stanford's Alpaca dataset."""


EndMarks = Literal["turn", "all", "last", "none"]
"""Which end-of-message tokens are learned: those behind learned messages ("turn"), behind all messages, only the last
one, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedTurns:
    """Which messages of a conversation the model learns, by axolotl's rules, and which of the end tokens behind them.

    `roles`: the roles whose messages are learned where a message itself does not say; None: all roles. `eos`: which of
    the tokenizer's end-of-sequence tokens are learned. `eot`: which of the tokens in `marks` are learned, which are
    axolotl's `eot_tokens` and end a message. Without `marks` the tokenizer's end token ends a message.
    """

    roles: frozenset[str] | None
    eos: EndMarks = "turn"
    eot: EndMarks = "turn"
    marks: tuple[str, ...] = ()


Formatting = Literal["alpaca", "sharegpt", "openai"]
"""The formats that a dataset may have in LLaMA-Factory's dataset_info.json."""

Converter = Literal["v1", "alpaca", "sharegpt"]
"""The readers of LLaMA-Factory's v1 for the records of a dataset; `v1` reads its own form."""


class Draw(BaseModel):
    """A random sample of a dataset's rows, drawn as LLaMA-Factory's v1 draws it: `size` rows from all rows, then from
    these `weight` times as many. Each draw is with replacement, so a row may come several times.

    Python's `random.Random(seed)` draws the rows. `skip`: how many random numbers it gives to other datasets before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    size: Count | None = None
    weight: Annotated[float, Field(gt=0, le=1000)] | None = None
    skip: Annotated[int, Field(ge=0, le=10**9)] = 0

    def times(self, rows: int) -> Counter[int]:
        """Return how often each of a dataset's `rows` rows is drawn: row number, from 0 -> count."""
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
    """An entry of `dataset` or `eval_dataset` is a path or a Hugging Face id, or a mapping with these keys, which are
    axolotl's where axolotl has them."""

    model_config = _VALUE

    path: Annotated[Text, Field(description="a path or Hugging Face id")]
    """A file, a folder or the id of a hub dataset. Beside `data_files` or `data_dir` it may also be `json`, `csv`,
    `parquet`, `arrow` or `text`."""
    name: Annotated[Text | None, Field(description="text, or null")] = None
    """The configuration of a hub dataset."""
    split: Annotated[
        str,
        Field(
            pattern=r"^[\w.-]+(\[[^\[\]]*\])?(\+[\w.-]+(\[[^\[\]]*\])?)*$",
            description="the name of a split, or a part of one like train[:1%]",
        ),
    ] = "train"
    """The split whose records are used. `train[:1%]` is a part of it, also of files."""
    data_files: Annotated[tuple[Text, ...], Field(description="a file's name, or a list of them")] = ()
    """The files that are read in the folder or hub dataset `path`, or anywhere if `path` is `json`, `csv` or the
    like."""
    data_dir: Annotated[Text | None, Field(description="a folder's name, or null")] = None
    """The folder in `path` that is read."""
    revision: Annotated[Text | None, Field(description="a branch, tag or commit, or null for main")] = None
    """The revision of a hub dataset."""
    type: Annotated[
        Type | None,
        Field(
            description="text, messages, prompt, instructions, segments, tokens, preference, unpaired, a type of "
            "axolotl's, or null"
        ),
    ] = None
    """The format of the records ([formats](data.md#record-formats)). null: the columns show it. Types of axolotl's are
    `alpaca` (always under the Alpaca prompt, without the columns `system` and `history`, but `columns: {system:
    system}` uses the first), `chat_template` and `sharegpt` (which are `messages`), `completion` and `pretrain`
    (`text`) and `input_output` (`segments`). A mapping with `format`, `no_input_format`, `system_prompt`,
    `system_format` and `field_…`, as in axolotl, sets a prompt of your own."""
    columns: Annotated[dict[str, str], Field(description="a mapping of names to names, or a list of names")] = {}
    """offmate's name of a column and its name in the data, such as `messages: turns`. The name `""` means that the
    column is not used. A list is TRL's: only these columns are used. axolotl's `field_messages`, `field_tools` and
    `field` name one column each."""
    message_keys: Annotated[dict[str, str], Field(description="a mapping of names to names")] = {}
    """The name of a message's key here and its name in the data, such as `content: text`. axolotl's
    `message_property_mappings`, `message_field_…` and `field_thinking` mean the same."""
    roles: Annotated[dict[str, str], Field(description="a mapping of roles to roles or to lists of roles")] = {}
    """A role in the data and the role that it means, such as `bot: assistant`. axolotl's form `assistant: [bot]` means
    the same."""
    prompt_format: Annotated[PromptFormat | None, Field(description="a mapping, or null")] = None
    """The texts that turn an instruction into a prompt if no chat template is used: `with_input` and `without_input`,
    for records with and without the column `input`, and `system`, for records without a system text. In them
    `{instruction}`, `{input}` and `{system}` stand for the columns. offmate writes this key into `resolved.yaml` for
    axolotl's mapping in `type`."""
    max_samples: Annotated[Count | None, Field(description="a whole number from 1 to 10^9, or null for all")] = None
    """Only the first records are used, as many as this number says. The smaller of this and the job's `max_samples`
    counts."""
    drop_system: Annotated[bool, Field(description="true or false")] = False
    """True: a system turn at the beginning of a conversation is left out. axolotl calls it `drop_system_message`."""
    roles_to_train: Annotated[tuple[Text, ...] | None, Field(description="a list of roles, or null")] = None
    """The roles whose turns are learned, such as `[assistant]`, by [axolotl's
    rules](data.md#axolotls-rules-for-learned-turns). `[]`: only turns are learned that say so themselves."""
    train_on_eos: Annotated[EndMarks | None, Field(description="turn, all, last, none or null")] = None
    """Which of the tokenizer's end tokens are learned: with `turn` those of learned turns, with `all` those of all
    turns, with `last` that of the last learned turn, with `none` no end token. null: `turn`, if another of axolotl's
    keys for learned turns is given."""
    train_on_eot: Annotated[EndMarks | None, Field(description="turn, all, last, none or null")] = None
    """Which of the tokens in `eot_tokens` are learned, in the words of `train_on_eos`. null: as `train_on_eos` says."""
    eot_tokens: Annotated[tuple[Text, ...] | None, Field(description="a list of tokens, or null")] = None
    """Tokens that end a turn, for `roles_to_train`, `train_on_eos` and `train_on_eot`. null: the tokenizer's end token,
    and those with which the template ends an answer."""
    chat_template_kwargs: Values = None
    """Values for the chat template, added to the job's, with precedence over these; a conversation's own column of this
    name has precedence over both. The chat template itself is one for all entries."""
    split_thinking: Annotated[Text | None, Field(description="true, the key for the thoughts, or null")] = None
    """True: in the assistant's answers, text in `<think>`, `<reasoning>` or `<|begin_of_thought|>` becomes the
    message's `reasoning_content`, or the key that is named by axolotl's `template_thinking_key`. An answer with text
    before that, or outside its `<|begin_of_solution|>`, is a broken record; axolotl drops that text."""
    formatting: Annotated[Formatting | None, Field(description="alpaca, sharegpt, openai or null")] = None
    """Records are read as LLaMA-Factory reads them with this `formatting`. Then only the roles in `roles` are known."""
    converter: Annotated[Converter | None, Field(description="v1, alpaca, sharegpt or null")] = None
    """Records are read and rows are made as LLaMA-Factory's v1 does with this converter, whatever `train_on` says; `v1`
    is its own form ([files of v1](../how-to/other-tools.md))."""
    draw: Annotated[Draw | None, Field(description="a mapping of seed, size, weight and skip, or null")] = None
    """With `converter`, the rows that LLaMA-Factory's v1 draws under `seed` by `size` and `weight` after `skip` other
    draws. A row may come several times."""
    pair_format: Annotated[PairFormat | None, Field(description="a mapping, or null")] = None
    """The columns and texts of axolotl's data of preferences; `type` is then `preference` or `unpaired`. offmate writes
    this key into `resolved.yaml` for a type of axolotl's, and you need not give it."""

    @model_serializer(mode="wrap")
    def _as_before(self, others: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields in `_LATER` that are None. A checkpoint written before these fields existed then still names
        an equal entry."""
        fields: dict[str, Any] = others(self)
        return {key: value for key, value in fields.items() if key not in _LATER or value is not None}

    @property
    def learned(self) -> LearnedTurns | None:
        """The rules for which messages are learned; None where no axolotl key of the entry sets them: then the
        assistant's messages are learned that the chat template marks."""
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
        """The format of the dataset's records, as the entry's `type` says; None where their columns show it."""
        return _KINDS[self.type] if self.type is not None else None

    def most(self, of_job: int | None) -> int | None:
        """Return how many of the dataset's records are used at most: the smaller of the entry's `max_samples` and the
        job's (`of_job`); None: all."""
        return min((most for most in (self.max_samples, of_job) if most is not None), default=None)

    @property
    def whole(self) -> bool:
        """Whether the entry uses all records of the dataset, not another split than `train` or a part of one."""
        return self.split == "train"

    @property
    def _needed(self) -> tuple[str, ...]:
        """The columns that records of the entry's `type` must have, by offmate's names."""
        if self.type is None or self.pair_format is not None:  # of its columns each record tells
            return ()
        if self.type == "unpaired" and self.formatting is not None:
            return _UNPAIRED[self.formatting]
        return COLUMNS[self.type]

    def names(self, columns: tuple[str, ...]) -> tuple[str, ...]:
        """Return the dataset's column names as offmate calls these columns (prompt, completion, messages, …), by the
        entry's `columns`. The argument has the names in the data. Raises ValueError where a column is missing that the
        entry needs."""
        needed = {self.columns.get(column, column) for column in self._needed}
        optional = {"input", "system", "tools", "history", VALUES}  # data may lack these
        needed |= {theirs for ours, theirs in self.columns.items() if theirs and ours not in optional}
        if columns and (missing := sorted(needed - set(columns))):
            raise ValueError(f"there is no column {missing[0]}; found: {', '.join(columns)}")
        taken = set(self.columns.values())
        ours = [name for name, theirs in self.columns.items() if theirs in columns]
        return (*ours, *(column for column in columns if column not in taken and column not in self.columns))

    def mapped(self, record: Record) -> Record:
        """Return the record with its columns, message keys and roles renamed from the data's names to offmate's
        (prompt, completion, messages, …), as the entry says. Raises ValueError for messages that cannot be read."""
        if self.pair_format is not None and self.kind is not None:
            return self.pair_format.read(record, self.kind, self._message)
        of_axolotl = self.learned is not None
        renamed = self.columns or self.message_keys or self.roles or self.drop_system or self.split_thinking
        if not (renamed or of_axolotl):
            return record
        taken = set(self.columns.values())
        fields = {key: value for key, value in record.items() if key not in taken and key not in self.columns}
        fields |= {ours: record[theirs] for ours, theirs in self.columns.items() if theirs in record}
        fields = as_axolotl(fields) if of_axolotl else fields
        for column in SIDES:
            if isinstance(answer := fields.get(column), dict):  # LLaMA-Factory's answers are single messages
                fields[column] = self._message(answer)
        for column in ("messages", "conversations", "prompt", "completion", *SIDES):
            if isinstance(listed := fields.get(column), list):
                messages = [self._message(message) for message in listed]
                messages = [*map(with_arguments, messages)] if of_axolotl else messages
                fields[column] = messages[self.drop_system and messages != [] and _is_system(messages[0]) :]
        return fields

    def _message(self, message: Any) -> Any:
        if not isinstance(message, dict):
            return message  # `conversation` reports what is wrong
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
    """Return a value of the job's `dataset` as a `DataEntry`, also where it is only a path or hub id."""
    return value if isinstance(value, DataEntry) else DataEntry(path=value)


def simplest(values: Mapping[str, Any]) -> str | DataEntry:
    """Return the entry with these fields; only its path where no other field is set. Raises pydantic's
    ValidationError."""
    entry = DataEntry.model_validate(dict(values))
    return entry.path if entry == DataEntry(path=entry.path) else entry


# ---- reads conversations as axolotl does, from any file: nulls count as absent, and JSON in texts is parsed


_COLUMNS = ("messages", "conversations", "tools")


def as_axolotl(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record, whose columns have offmate's names, as axolotl reads it: without keys whose value is null. Where
    messages, tools or the parameters of a tool are text, the text is parsed as JSON; nulls in that JSON stay. Raises
    ValueError for text that is not JSON."""
    cleaned: dict[str, Any] = _without_nulls(record)
    for column in _COLUMNS:
        _read_in(cleaned, column, column)
    for tool in _objects(cleaned.get("tools")):
        _read_in(tool.get("function"), "parameters", "parameters of a tool")
    return cleaned


def with_arguments(message: Any) -> Any:
    """Return a message in which the arguments of tool calls are parsed as JSON where they are text. The chat template
    can then write them in its own way. Changes the message in place. Raises ValueError for text that is not JSON."""
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
    """Replace the text under a key of `place` by the JSON value that it holds."""
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
    """Return the message with an assistant's thoughts moved to `key`: axolotl's `split_thinking`.

    The thoughts are the text between marks such as <think> and </think>, stripped. The content becomes the text behind
    them, or the solution that is marked in that text. Other messages, and answers without marks, are returned
    unchanged. Raises ValueError where the content has words outside of thoughts and solution: axolotl drops these
    silently.
    """
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

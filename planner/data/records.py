"""Training records: finds out which format a record has from its columns, and checks that it can be read in that
format. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from planner.data.json_values import json_in
from planner.errors import Exit, UserError
from planner.keys.fields import VALUES, template_values
from planner.keys.source import shown

Record = Mapping[str, object]
Message = dict[str, Any]
"""One chat message: `role`, `content`, and any other key of the record's message (tool_calls, reasoning_content, name,
…), which the chat template receives unchanged. `train` is present only where the record says whether the model learns
this message."""
TrainOn = Literal["completions", "pairs", "answers", "all_answers", "all"]
Kind = Literal["tokens", "messages", "conversations", "prompt", "alpaca", "text", "segments", "preference", "unpaired"]

ALPACA = ("system", "instruction", "input", "output")
_COLUMNS = {"alpaca": ALPACA, "text": ("text",)}

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
ROLES = tuple(dict.fromkeys(_ROLES.values()))
_OWN = frozenset({"role", "from", "content", "value", "train", "weight"})
"""The keys of a message that this module reads itself; the chat template receives all others."""
_INSTEAD = frozenset({"tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"})
"""Keys that may replace `content` in a message."""


_NEEDED: dict[Kind, tuple[str, ...]] = {
    "tokens": ("input_ids",),
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "segments": ("segments",),
    "preference": ("chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
"""Record format -> the columns that show it. Where several formats match, the first one counts."""
PREFERENCES: tuple[Kind, ...] = ("preference", "unpaired")
"""The formats of jobs with `preference`, for which they count before all others."""


def _known(columns: Collection[str]) -> Kind | None:
    return next((kind for kind, needed in _NEEDED.items() if set(needed) <= set(columns)), None)


def check_kind(kind: Kind, record: Record) -> None:
    """Raise ValueError if a record has another format than the rest of the dataset (`kind`), as happens where two files
    were joined. Without this check such a record would be taken for an empty one."""
    has = {column for column, value in record.items() if value}
    if not has & set(_NEEDED[kind]) and (other := _known(has)) is not None:
        raise ValueError(f"it has no {' and '.join(_NEEDED[kind])}, but {' and '.join(_NEEDED[other])}")


def lacks_of(kind: Kind, record: Record) -> str:
    """Return which columns a record of format `kind` lacks, as an error text such as "has no prompt"; "" where it has
    all. The text is meant to follow the record's place: "line 3 of a.jsonl has no prompt". Records of preferences that
    lack one are not empty but broken."""
    if kind in PREFERENCES:
        return ""
    missing = [column for column in _NEEDED[kind] if column not in record]
    return f"has no {' and '.join(missing)}" if missing else ""


def kind_of(columns: Collection[str], name: str, *, preferred: bool = False) -> Kind:
    """Return the record format that these columns show. `name`: the dataset's name, for the error. `preferred`: records
    of preferences are wanted. Raises UserError that lists the columns where no format matches, or where `input_ids`
    stands beside the columns of another format."""
    for wanted in PREFERENCES if preferred else ():
        if set(_NEEDED[wanted]) <= set(columns):
            return wanted
    others = [kind for kind, needed in _NEEDED.items() if set(needed) <= set(columns) - {"input_ids"}]
    if (kind := _known(columns)) == "tokens" and others:
        raise UserError(
            f"The records of {name} have input_ids, and {' and '.join(_NEEDED[others[0]])} beside them.",
            code="unknown-columns",
            exit_code=Exit.USAGE,
            numbers=(f"found: {', '.join(columns)}",),
            hint="say in the entry of dataset which is meant: type: tokens, or columns: {input_ids: ''} for the other",
        )
    if kind is not None:
        return kind
    raise UserError(
        f"The columns of {name} are not a format that is known.",
        code="unknown-columns",
        exit_code=Exit.USAGE,
        numbers=(
            f"found: {', '.join(columns)}",
            "known: text | messages | conversations | prompt, completion | instruction, (input,) output | segments | "
            "input_ids, (labels) | (prompt,) chosen, rejected | prompt, completion, label",
        ),
        hint="name them in the entry, such as type: instructions, columns: {instruction: question, output: answer}, "
        "or rename them",
    )


def no_columns(name: str, what: str) -> UserError:
    """Return the error for a dataset that lacks the columns its entry in the job file names. `name`: the dataset;
    `what`: which column is missing, in words."""
    return UserError(
        f"The columns of {name} are not those that its entry names.",
        code="unknown-columns",
        exit_code=Exit.USAGE,
        numbers=(what,),
        hint="correct the entry of dataset, or the data",
    )


def text_of(record: Record, column: str) -> str:
    """Return the text in a column of a record; "" where it is missing or null. Raises ValueError for a value that is
    not text."""
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"column {column} is text, this is {shown(value, 80)}")
    return value


def pair_of(record: Record) -> tuple[str, str]:
    """Return the texts of a record's prompt and completion. Raises ValueError where one is not text, and for a
    completion whose prompt is missing or null: the model would learn to write it unasked. An empty prompt must be
    written as ""."""
    prompt, completion = text_of(record, "prompt"), text_of(record, "completion")
    if record.get("prompt") is None and completion:
        raise ValueError('column prompt is null or missing, and there is a completion; write "" for an empty prompt')
    return prompt, completion


def role_of(name: str) -> str | None:
    """Return the role ("system", "user", "assistant" or "tool") that a dataset means by `name`, such as "assistant" for
    "gpt"; None for an unknown name."""
    return _ROLES.get(name)


def conversation(value: object) -> list[Message]:
    """Return the messages of a record's list (see `Message`). Both spellings of the keys are read: role/content and
    from/value. A message of the role `function_call`, whose content is JSON, becomes an assistant's message with
    `tool_calls`.

    Raises ValueError that says what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"a conversation is a list of messages, this is {shown(value, 80)}")
    return [_message(entry) for entry in value]


def _message(entry: object) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"a message is an object with role and content, this is {shown(entry, 80)}")
    more = {key: value for key, value in entry.items() if value is not None and key not in _OWN}
    for key, value in more.items():
        check_json(value, f"a message's {key}")
    if isinstance(call := more.pop("function_call", None), dict):  # OpenAI's form before `tool_calls`
        more.setdefault("tool_calls", [{"type": "function", "function": call}])
    named = entry.get("role") or entry.get("from")
    content = entry["content"] if entry.get("content") is not None else entry.get("value")
    if named == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _calls(content), **more, **_trained(entry)}
    role = _ROLES.get(str(named))
    if role is None:
        raise ValueError(f"unknown role {shown(named, 80)}")
    if content is None and not more.keys() & _INSTEAD:
        has = ", ".join(str(key) for key in entry if entry[key] is not None)
        raise ValueError(f"a message has no content; what it has is {has}")
    return {"role": role, "content": _content(content), **more, **_trained(entry)}


def _trained(entry: Mapping[str, object]) -> dict[str, bool]:
    """Return {"train": True or False} where the message says whether it is learned, else {}. It says so by `train`
    (axolotl's key) or by `weight: 0` (OpenAI's key, whose value 1 is the default)."""
    marks = {key: entry[key] for key in ("train", "weight") if entry.get(key) is not None}
    for key, value in marks.items():
        if value not in (0, 1):  # True and False are 1 and 0
            raise ValueError(f"a message's {key} is 0 or 1 (false or true), this is {shown(value, 80)}")
    if not all(marks.values()):
        return {"train": False}
    return {"train": True} if "train" in marks else {}


def _calls(content: object) -> list[dict[str, Any]]:
    """Return the tool calls in the JSON content of a message: one object with name and arguments, or a list of them."""
    try:
        parsed = json_in(_content(content))
    except ValueError as error:
        what = f"a function_call is JSON with name and arguments, this is {shown(content, 80)}"
        raise ValueError(f"{what}, which {error}") from None
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise ValueError(f"a function_call has a name and arguments, this is {shown(content, 80)}")
    return [{"type": "function", "function": call} for call in calls]


def check_json(value: object, what: str) -> None:
    """Raise ValueError if a value is not one that JSON has, such as a date from a Parquet table: a chat template would
    print its Python form. `what`: the value's name in the error."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for one in value:
            check_json(one, what)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError(f"{what} has a {type(value).__name__}, which is no value of JSON: {str(value)[:80]}")


def tools_of(record: Record) -> list[Any] | None:
    """Return the definitions of the tools that a conversation may call; None where there are none. They are read from
    the column `tools`, a list or the JSON text of one, or from OpenAI's older column `functions`. Raises ValueError."""
    value = record.get("tools")
    if not value and isinstance(functions := record.get("functions"), list):
        value = [{"type": "function", "function": function} for function in functions]
    if isinstance(value, str) and value:
        try:
            value = json_in(value)
        except ValueError as error:
            raise ValueError(f"tools are a list, or JSON of one, this is {shown(value, 80)}, which {error}") from None
    if not value:
        return None
    if not isinstance(value, list):
        raise ValueError(f"tools are a list, or JSON of one, this is {shown(value, 80)}")
    check_json(value, "tools")
    return value


def values_of(record: Record) -> dict[str, Any]:
    """Return the variables that a record sets for the chat template, from its column `chat_template_kwargs`: a mapping,
    or the JSON text of one. {} where the column is missing. Raises ValueError."""
    value = record.get(VALUES)
    if isinstance(value, str) and value:
        try:
            value = json_in(value)
        except ValueError as error:
            what = f"{VALUES} is a mapping, or JSON of one, this is {shown(value, 80)}"
            raise ValueError(f"{what}, which {error}") from None
    return template_values(value) if value else {}


def segments_of(record: Record) -> list[tuple[str, bool]]:
    """Return the parts of a text, each with whether the model learns it, from the column `segments`: a list of objects
    with `text` and `label` (a boolean). Raises ValueError."""
    value = record.get("segments") or []
    if not isinstance(value, list) or not all(
        isinstance(piece, dict) and isinstance(piece.get("text"), str) and isinstance(piece.get("label"), bool)
        for piece in value
    ):
        raise ValueError(f"segments are a list of objects with text and label, this is {shown(value, 80)}")
    return [(piece["text"], piece["label"]) for piece in value]


_NOT_LEARNED = -100
_MASKS = ("completion_mask", "assistant_masks")


def tokens_of(record: Record, *, prompts: bool = False) -> tuple[list[int], list[bool]]:
    """Return the token ids of a tokenized record, without padding, and for each token whether it is learned.

    Tokens with a label other than -100 in the column `labels` are learned. Without labels it is the tokens that all of
    TRL's masks mark (`completion_mask`, `assistant_masks`), and without masks all tokens. `prompts`: ignore
    `completion_mask`, so that prompts are learned, too. Raises ValueError.
    """
    tokens = _numbers(record, "input_ids", None)
    labels, attention = (_numbers(record, column, len(tokens)) for column in ("labels", "attention_mask"))
    masks = [mask for column in _MASKS[prompts:] if (mask := _numbers(record, column, len(tokens)))]
    if labels:
        learned = [label != _NOT_LEARNED for label in labels]
        for token, label in zip(tokens, labels, strict=True):
            if label not in (_NOT_LEARNED, token):
                what = f"one is {label} for {token}"
                raise ValueError(f"labels are the tokens of input_ids, or -100 where one is not learned; {what}")
    else:
        learned = [all(marks) for marks in zip(*masks, strict=True)] if masks else [True] * len(tokens)
    if attention and not all(attention):
        first, past = (
            attention.index(1) if 1 in attention else 0,
            len(attention) - attention[::-1].index(1) if 1 in attention else 0,
        )
        if not all(attention[first:past]):
            raise ValueError("attention_mask leaves out tokens that are no padding")
        return tokens[first:past], learned[first:past]
    return tokens, learned


def _numbers(record: Record, column: str, count: int | None) -> list[int]:
    """Return the whole numbers in a column; [] where the column is missing. Raises ValueError unless there are `count`
    of them (None: any number)."""
    value = record.get(column)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(number) in (int, bool) for number in value):
        raise ValueError(f"column {column} is a list of whole numbers, this is {shown(value, 80)}")
    if count is not None and len(value) != count:
        raise ValueError(f"column {column} has {len(value)} numbers for {count} of input_ids")
    return [*map(int, value)]


def history_of(record: Record) -> list[Message]:
    """Return the messages before an Alpaca record's instruction, from its column `history`: pairs of a user's and an
    assistant's text. Raises ValueError."""
    value = record.get("history")
    if not value:
        return []
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    ):
        raise ValueError(f"history is a list of pairs [user's text, answer], this is {shown(value, 80)}")
    return [
        {"role": role, "content": text}
        for pair in value
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def is_chat(kind: Kind, record: Record) -> bool:
    """Return whether the record is a conversation, so that a chat template is needed to write it as text."""
    if kind == "preference":
        return isinstance(record.get("chosen"), (list, dict))
    if kind == "unpaired" and isinstance(record.get("completion"), list):
        return True
    return kind in ("messages", "conversations") or (kind == "prompt" and isinstance(record.get("prompt"), list))


def check_answers(train_on: TrainOn, kind: Kind, record: Record) -> None:
    """Raise UserError if `train_on` asks to learn the assistant's answers and the record is no conversation."""
    if train_on in ("answers", "all_answers") and kind != "tokens" and not is_chat(kind, record):
        raise UserError(
            f"train_on: {train_on} learns the assistant's turns, and the data are not conversations.",
            code="no-turns",
            exit_code=Exit.USAGE,
            numbers=(f"they are read as {kind}",),
            hint="leave train_on (TRL's assistant_only_loss) out, or give conversations",
        )


def check_record(kind: Kind, record: Record) -> bool:
    """Return whether a record has something to learn; records that have nothing are left out. Raises ValueError that
    says what is wrong with a broken record, as far as this shows without a tokenizer."""
    check_kind(kind, record)
    if kind == "tokens":
        return any(tokens_of(record)[1])
    if kind in ("messages", "conversations"):
        if record.get(kind) and conversation(record[kind]):
            tools_of(record), values_of(record)
            if kind == "conversations":
                text_of(record, "system")
        return bool(record.get(kind))
    if is_chat(kind, record):
        tools_of(record), values_of(record)
        return bool(conversation(record["prompt"]) + conversation(record.get("completion")))
    if kind == "segments":
        return any(learned for _, learned in segments_of(record))
    if kind == "alpaca":
        history_of(record)
    texts = pair_of(record) if kind == "prompt" else [text_of(record, column) for column in _COLUMNS[kind]]
    return bool(texts[-1])


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        if other := next((part["type"] for part in content if part.get("type") not in (None, "text")), None):
            raise ValueError(f"a part of a message's content is of type {other}, and no text")
        if any(part.get(key) is not None for part in content for key in ("train", "weight")):
            raise ValueError("a part of a message's content has train or weight; a turn is learned whole or not")
        return "".join(part["text"] for part in content)
    raise ValueError(f"a message's content is text, this is {shown(content, 80)}")

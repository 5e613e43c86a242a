"""What records of training data are: their kind, by their columns, and whether they can be read as that. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from planner.errors import Exit, UserError

Record = Mapping[str, object]
Message = dict[str, str]
Kind = Literal["messages", "conversations", "prompt", "alpaca", "text"]

ALPACA = ("system", "instruction", "input", "output")
_COLUMNS = {"prompt": ("prompt", "completion"), "alpaca": ALPACA, "text": ("text",)}

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip


def kind_of(columns: Collection[str], name: str) -> Kind:
    """The kind of records that the columns of the dataset `name` show. Raises UserError listing what was found."""
    has = set(columns)
    if "messages" in has:
        return "messages"
    if "conversations" in has:
        return "conversations"
    if {"prompt", "completion"} <= has:
        return "prompt"
    if {"instruction", "output"} <= has:
        return "alpaca"
    if "text" in has:
        return "text"
    raise UserError(
        f"The columns of {name} are not a format that is known.", code="unknown-columns", exit_code=Exit.USAGE,
        numbers=(
            f"found: {', '.join(columns)}",
            "known: text | messages | conversations | prompt, completion | instruction, (input,) output",
        ),
        hint="rename the columns of the data to one of these sets",
    )  # fmt: skip


def text_of(record: Record, column: str) -> str:
    """The text in a column, "" where there is none. Raises ValueError for anything else."""
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"column {column} is text, this is {str(value)[:80]!r}")
    return value


def conversation(value: object) -> list[Message]:
    """Messages with `role` and `content` from a record's list, in either spelling (role/content, from/value).

    Raises ValueError saying what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"a conversation is a list of messages, this is {str(value)[:80]!r}")
    messages = []
    for entry in value:
        if not isinstance(entry, dict):
            raise ValueError(f"a message is an object with role and content, this is {str(entry)[:80]!r}")
        named = entry.get("role") or entry.get("from")
        role = _ROLES.get(str(named))
        if role is None:
            raise ValueError(f"unknown role {named!r}")
        content = entry["content"] if entry.get("content") is not None else entry.get("value")
        messages.append({"role": role, "content": _content(content)})
    return messages


def is_chat(kind: Kind, record: Record) -> bool:
    """Whether the record needs a chat template."""
    return kind in ("messages", "conversations") or (kind == "prompt" and isinstance(record.get("prompt"), list))


def check_record(kind: Kind, record: Record) -> bool:
    """Whether there is something in a record to learn from; False: it is left out. Raises ValueError saying what is
    wrong, as far as that can be told without a tokenizer."""
    if kind in ("messages", "conversations"):
        if record.get(kind) and conversation(record[kind]) and kind == "conversations":
            text_of(record, "system")
        return bool(record.get(kind))
    if is_chat(kind, record):
        return bool(conversation(record["prompt"]) + conversation(record.get("completion")))
    texts = [text_of(record, column) for column in _COLUMNS[kind]]
    return bool(texts[-1])


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    raise ValueError(f"a message's content is text, this is {str(content)[:80]!r}")

"""Reads training records as LLaMA-Factory's v1 does, and makes its rows of them: one row for each assistant's answer
that is learned, with all messages before it. Does not import torch.

Where v1 drops a part of a record with a warning, or fails, the record counts as broken.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.data.entry import Converter, Draw
from planner.data.records import Record, check_json
from planner.keys.source import shown

Part = tuple[Literal["text", "reasoning", "tool_call"], str]
"""A part of a message: its kind and its text. For a tool call the text is JSON."""
_PICTURES = ("images", "videos", "audios")
_PLACES = ("<image>", "<video>", "<audio>")
_TAGS = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
_LEAST = 1e-6  # a weight up to which nothing is learned


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message of a conversation, as LLaMA-Factory's v1 reads it: its role and its parts. `learned`: it is an answer
    that the model learns, in a training row of its own."""

    role: str
    parts: tuple[Part, ...]
    learned: bool

    def told(self) -> dict[str, Any]:
        """Return the message as the mapping that a chat template takes: role, content and, where it has them,
        tool_calls and reasoning_content."""
        message: dict[str, Any] = {"role": self.role, "content": self._joined("text")}
        if calls := [json.loads(value) for kind, value in self.parts if kind == "tool_call"]:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in calls
            ]
        return message | ({"reasoning_content": thought} if (thought := self._joined("reasoning")) else {})

    def _joined(self, wanted: str) -> str:
        return "".join(value for kind, value in self.parts if kind == wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """The conversation in one record, as LLaMA-Factory's v1 reads it. `tools`: the definitions of tools as JSON text,
    "" for none."""

    messages: tuple[Said, ...]
    tools: str = ""

    @property
    def rows(self) -> tuple[int, ...]:
        """For each training row that this conversation makes: the number of messages in it, counted from the first
        message. The last of them is the answer that is learned. A conversation without such an answer makes one row,
        with nothing learned."""
        counts = (
            place for place, message in enumerate(self.messages, 1) if message.role == "assistant" and message.learned
        )
        return tuple(counts) or (len(self.messages),)


def talk_of(converter: Converter, record: Record) -> Talk:
    """Return the conversation in a record as LLaMA-Factory's v1 reads it. `converter`: v1's name for the record's
    format. Raises ValueError for a record of which v1 drops a part, or at which it fails."""
    if pictures := [column for column in _PICTURES if record.get(column)]:
        raise ValueError(f"it has {pictures[0]}; offmate trains on texts and conversations")
    if "chosen_messages" in record or "rejected_messages" in record:
        raise ValueError("it is a pair of answers to prefer one of; offmate trains on texts and conversations")
    read = {"v1": _own_form, "alpaca": _instruction, "sharegpt": _conversation}[converter]
    talk = read(record)
    learned = any(message.role == "assistant" and message.learned for message in talk.messages)
    if not talk.messages or not (learned or talk.messages[-1].role == "assistant"):
        raise ValueError("it has no answer of the assistant, and LLaMA-Factory's v1 stops at such a record")
    if talk.messages[0].role == "assistant":
        raise ValueError("it begins with an answer, without a question before it")
    return talk


def check(converter: Converter, record: Record) -> bool:
    """Return whether a record has an answer to learn, as LLaMA-Factory's v1 reads it. `converter`: v1's name for the
    record's format. Raises ValueError for a record of which v1 drops a part, or at which it fails."""
    return any(message.role == "assistant" and message.learned for message in talk_of(converter, record).messages)


def times_taken(draw: Draw, converter: Converter, records: Iterable[Record]) -> list[int]:
    """Return, for each training row that LLaMA-Factory's v1 makes of these records, how often the random sample `draw`
    has it. `converter`: v1's name for the records' format. Broken records make no rows."""
    count = 0
    for record in records:
        try:
            count += len(talk_of(converter, record).rows)
        except ValueError:
            continue
    times = draw.times(count)
    return [times[place] for place in range(count)]


def _instruction(record: Record) -> Talk:
    """Read an Alpaca record. Instruction and input are joined with nothing between them, as v1 does."""
    messages = []
    if (system := _column(record, "system")) is not None:
        messages.append(Said(role="system", parts=(("text", system),), learned=False))
    texts = [_column(record, column) for column in ("instruction", "input")]
    if any(text is not None for text in texts):
        messages.append(Said(role="user", parts=(_text("".join(filter(None, texts))),), learned=False))
    if (answer := _column(record, "output")) is not None:
        messages.append(Said(role="assistant", parts=(("text", answer),), learned=True))
    return Talk(messages=tuple(messages))


def _conversation(record: Record) -> Talk:
    messages = []
    for message in _messages(record.get("messages")):
        tag, value = message.get("from"), message.get("value")
        if not isinstance(tag, str) or tag not in _TAGS:
            raise ValueError(f"a message is from {shown(tag, 80)}, which is none of {', '.join(_TAGS)}")
        if not isinstance(value, str):
            raise ValueError(f"a message's value is text, this is {shown(value, 80)}")
        if tag == "function_call":
            calls = _json(value, "a function_call")
            parts: list[Part] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
            messages.append(Said(role="assistant", parts=tuple(parts), learned=True))
        else:
            messages.append(Said(role=_TAGS[tag], parts=(_text(value),), learned=tag == "gpt"))
    return Talk(messages=tuple(messages), tools=_tools(record, again=True))


def _own_form(record: Record) -> Talk:
    messages = []
    for message in _messages(record.get("messages")):
        role, content, weight = (message.get(key) for key in ("role", "content", "loss_weight"))
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"unknown role {shown(role, 80)}")
        if not isinstance(content, list) or not content:
            what = "a message's content is a list of objects with type and value"
            raise ValueError(f"{what}, this is {shown(content, 80)}")
        weight = 1.0 if weight is None else weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
            raise ValueError(f"a message's loss_weight is a number, this is {shown(weight, 80)}")
        if role == "assistant" and weight > _LEAST and weight != 1:
            raise ValueError(f"an answer's loss_weight is {weight:g}; here answers are learned (1) or not (0)")
        parts = tuple(map(_part, content))
        messages.append(Said(role=role, parts=parts, learned=role == "assistant" and weight > _LEAST))
    return Talk(messages=tuple(messages), tools=_tools(record, again=False))


def _part(part: object) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    value = part.get("value") if isinstance(part, Mapping) else None
    if not isinstance(value, str):
        raise ValueError(f"a piece of a message has type and value, this is {shown(part, 80)}")
    if kind == "tool_call":
        return _call(_json(value, "a tool_call"), value)
    if kind == "text" or kind == "reasoning":
        return kind, value
    raise ValueError(f"a piece of a message is of type {shown(kind, 80)}, and no text")


def _text(value: str) -> Part:
    if place := next((place for place in _PLACES if place in value), None):
        raise ValueError(f"it has {place}, a place for something that offmate does not read")
    return "text", value


def _call(call: object, written: str | None = None) -> Part:
    """Return a tool call as a part of a message. Its arguments must be an object: v1 would write arguments that are
    JSON text as a quoted text."""
    named = isinstance(call, dict) and isinstance(call.get("name"), str)
    if not isinstance(call, dict) or not named or not isinstance(call.get("arguments"), dict):
        raise ValueError(f"a call has a name, and as arguments an object, this is {shown(call, 80)}")
    return "tool_call", json.dumps(call) if written is None else written


def _tools(record: Record, *, again: bool) -> str:
    """Return the record's tool definitions as JSON text. `again`: parsed and written anew, as v1 does for this
    format."""
    value = record.get("tools")
    if not value:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"tools are JSON of a list, this is {shown(value, 80)}")
    tools = _json(value, "tools")
    check_json(tools, "tools")
    return json.dumps(tools) if again else value


def _json(value: str, what: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{what} is JSON, this is {shown(value, 80)}: {error}") from None


def _messages(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"a conversation is a list of messages, this is {shown(value, 80)}")
    return value


def _column(record: Record, column: str) -> str | None:
    value = record.get(column)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column} is text, this is {shown(value, 80)}")
    return value

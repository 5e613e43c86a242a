"""Reads training records as LLaMA-Factory does: a system text, tools, and messages of the user and the assistant in
turn.

Records that LLaMA-Factory leaves out with a warning are left out, and those at which it fails count as broken. Does not
import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from planner.data.entry import Formatting
from planner.data.preference_records import PreferenceKind, parts_of
from planner.data.records import Kind, Record, conversation, role_of, text_of
from planner.keys.source import shown
from planner.units import counted

Role = Literal["user", "assistant", "calls", "results"]
_ASKS, _ANSWERS = ("user", "results"), ("assistant", "calls")
_ROLES: dict[str | None, Role] = {"user": "user", "assistant": "assistant", "function_call": "calls", "tool": "results"}
_APART = "\n</tool_response>\n<tool_response>\n"
_SHORT = "detailed thinking off"
_NOT_IN_PAIRS = "their turns are not in pairs of the user's and the assistant's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation. For the role `calls` the content is the JSON text of tool calls, perhaps with
    thoughts before it. `learned`: False only where the record says that the model does not learn it."""

    role: Role
    content: str
    learned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The conversation in one record, as LLaMA-Factory reads it. `tools`: the JSON text of a list of tool definitions,
    "" for none."""

    turns: tuple[Turn, ...]
    system: str = ""
    tools: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A conversation that ends with a message to be answered, and its answers; None: the record has no such answer."""

    conversation: Conversation
    chosen: Turn | None = None
    rejected: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Stands for a record that LLaMA-Factory leaves out of training. `why`: the reason, worded for several records:
    "they have no answer"."""

    why: str


def read(kind: Kind, record: Record, formatting: Formatting | None) -> Conversation | LeftOut:
    """Return the conversation in a record, whose columns have offmate's names, or the reason why LLaMA-Factory leaves
    it out. `kind`: the record's format; `formatting`: the dataset's format in dataset_info.json, None for a file that
    the job gives by its path. Raises ValueError for a record at which LLaMA-Factory fails."""
    if kind == "alpaca":
        answer = record.get("output")
        if not isinstance(answer, str):
            return LeftOut(why="they have no answer")
        asked = _asked(record)
        return replace(asked, turns=(*asked.turns, Turn(role="assistant", content=answer)))
    if formatting is None:
        for column in ("prompt", "completion") if kind == "prompt" else (kind,):
            _check_written(record.get(column))
    conversation = _conversation(_messages(kind, record), record, formatting)
    if isinstance(conversation, LeftOut):
        return conversation
    if not conversation.turns or len(conversation.turns) % 2:
        return LeftOut(why=_NOT_IN_PAIRS)
    return conversation


def read_pair(kind: PreferenceKind, record: Record, formatting: Formatting | None) -> Pair | LeftOut:
    """Return the conversation and the answers in a record of preferences, or the reason why LLaMA-Factory leaves it
    out. Arguments as in `read`. Raises ValueError for a record at which LLaMA-Factory fails, and for an empty
    answer."""
    if formatting is None:
        return _pair_of_trl(kind, record)
    if kind == "unpaired":
        if not isinstance(record.get("label"), bool):
            return LeftOut(why="their label is not true or false")
        if formatting == "alpaca":
            asked, answer = _asked(record), Turn(role="assistant", content=_checked(record.get("output")))
        else:
            whole = _conversation(_messages("messages", record), record, formatting)
            if isinstance(whole, LeftOut):
                return whole
            if not whole.turns or len(whole.turns) % 2:
                return LeftOut(why=_NOT_IN_PAIRS)
            asked, answer = replace(whole, turns=whole.turns[:-1]), whole.turns[-1]
            _checked(answer.content)
        return Pair(conversation=asked, **{"chosen" if record["label"] else "rejected": answer})
    answers, wanted = [record.get("chosen"), record.get("rejected")], str if formatting == "alpaca" else Mapping
    if not all(isinstance(answer, wanted) for answer in answers):
        return LeftOut(why="their chosen and rejected answers are not both there")
    if formatting == "alpaca":
        return _pair(_asked(record), [{"role": "assistant", "content": answer} for answer in answers])
    return _pair(_conversation(_messages("messages", record), record, formatting), answers)


def _pair_of_trl(kind: PreferenceKind, record: Record) -> Pair | LeftOut:
    """Return what `read_pair` does of a record in TRL's form, with lists of messages."""
    prompt, answers = parts_of(kind, record)
    for messages in (prompt, *answers.values()):
        _check_written(messages)
    if many := next((side for side, messages in answers.items() if len(messages) != 1), None):
        raise ValueError(f"the {many} answer is {counted(len(answers[many]), 'message')}, and this template writes one")
    asked = _conversation([*map(_message, prompt)], record, None)
    return _pair(asked, [answers.get(side, [None])[0] for side in ("chosen", "rejected")])


def _pair(asked: Conversation | LeftOut, answers: list[Any]) -> Pair | LeftOut:
    """Return the pair of a conversation and messages that are its answers, chosen and rejected; None: no such
    answer."""
    if isinstance(asked, LeftOut):
        return asked
    if not len(asked.turns) % 2:
        return LeftOut(why="the user or a tool does not have the last word before the answer")
    chosen, rejected = (None if answer is None else _answer(answer) for answer in answers)
    return Pair(conversation=asked, chosen=chosen, rejected=rejected)


def _answer(message: Any) -> Turn:
    read = _message(message)
    role = _ROLES.get(read["role"])
    if role is None or role not in _ANSWERS:
        raise ValueError(f"an answer is the assistant's, this is {shown(message, 80)}")
    return Turn(role=role, content=_checked(read["content"]))


def _checked(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"an answer is text, and not empty; this is {shown(text, 80)}")
    return text


def _conversation(
    messages: list[dict[str, Any]], record: Record, formatting: Formatting | None
) -> Conversation | LeftOut:
    """Return the conversation of these messages with the record's system text and tools, or the reason why
    LLaMA-Factory leaves it out."""
    tools, system = _tools(record), text_of(record, "system")
    if messages and messages[0]["role"] == "system":
        system, messages = _said(messages[0]), messages[1:]
    if formatting == "openai":
        messages, system = _with_joined_results(messages), _with_short_thoughts(system, tools)
    roles = [_ROLES.get(message["role"]) for message in messages]
    for place, role in enumerate(roles):
        if role not in (_ANSWERS if place % 2 else _ASKS):
            return LeftOut(why="the user and the assistant do not speak in turn")
    turns = tuple(
        Turn(role=role, content=_said(message), learned=message.get("train", True))
        for role, message in zip(roles, messages, strict=True)
        if role is not None
    )
    return Conversation(turns=turns, system=system, tools=tools)


def check(kind: Kind, record: Record, formatting: Formatting) -> bool:
    """Return whether a record has something to learn, as LLaMA-Factory reads it. `kind`: the record's format;
    `formatting`: the dataset's format in dataset_info.json. Raises ValueError for a record at which LLaMA-Factory
    fails."""
    if kind == "text":
        text_of(record, "text")
        return True  # at least an end token is learned
    if kind == "preference" or kind == "unpaired":
        return isinstance(read_pair(kind, record, formatting), Pair)
    return isinstance(read(kind, record, formatting), Conversation)


def _asked(record: Record) -> Conversation:
    """Return the conversation of an instruction without its answer."""
    history = record.get("history")
    turns: list[Turn] = []
    for pair in history if isinstance(history, list) else ():
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"history is a list of pairs [user's text, answer], this is {shown(history, 80)}")
        turns += [Turn(role="user", content=pair[0]), Turn(role="assistant", content=pair[1])]
    question = "\n".join(filter(None, (text_of(record, "instruction"), text_of(record, "input"))))
    turns.append(Turn(role="user", content=question))
    return Conversation(turns=tuple(turns), system=text_of(record, "system"), tools=_tools(record))


def _messages(kind: Kind, record: Record) -> list[dict[str, Any]]:
    """Return the messages of a record, with roles by offmate's names; the role is None for an unknown name."""
    if kind == "prompt":
        prompt = [{**message, "train": False} for message in _list(record.get("prompt"))]
        return [_message(message) for message in chain(prompt, _list(record.get("completion")))]
    return [_message(message) for message in _list(record.get(kind))]


def _check_written(messages: object) -> None:
    """Raise ValueError for content of a message that LLaMA-Factory's templates would not write."""
    for message in messages if isinstance(messages, list) else ():
        filled = {key for key, value in message.items() if value} if isinstance(message, Mapping) else set()
        if thoughts := sorted(filled & {"reasoning_content", "reasoning", "thinking"}):
            raise ValueError(f"a template of LLaMA-Factory's writes no {thoughts[0]}; put it into the content")
        if filled & {"tool_calls", "function_call"} and filled & {"content", "value"}:
            raise ValueError("LLaMA-Factory's templates leave out text beside tool calls")


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"a conversation is a list of messages, this is {shown(value, 80)}")
    return value


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is an object with role and content, this is {shown(message, 80)}")
    named = message.get("role") if message.get("role") is not None else message.get("from")
    role = named if named == "function_call" else role_of(str(named))
    calls = message.get("tool_calls")
    if calls is None and isinstance(call := message.get("function_call"), Mapping):
        calls = [{"function": call}]
    if role == "assistant" and calls:
        functions = [call.get("function") if isinstance(call, Mapping) else None for call in _list(calls)]
        return {**message, "role": "function_call", "content": _json(functions)}
    as_user = [message | {"from": None, "role": "user"}] if isinstance(message, dict) else []
    (read,) = conversation(as_user)  # content and `train` are read as in all conversations
    return {**read, "role": role}


def _said(message: Mapping[str, Any]) -> str:
    content = message["content"]
    assert isinstance(content, str)
    return content


def _tools(record: Record) -> str:
    tools = record.get("tools")
    return tools if isinstance(tools, str) else _json(tools) if tools is not None else ""


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:  # types of tables, such as dates
        raise ValueError(f"tools and tool calls are JSON values, this is none: {str(value)[:80]}") from error


def _with_joined_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with consecutive tool results joined into one. Results with no message behind them are
    dropped."""
    joined: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(_said(message))
            continue
        if results:
            joined.append({"role": "tool", "content": _APART.join(results)})
            results = []
        joined.append(message)
    return joined


def _with_short_thoughts(system: str, tools: str) -> str:
    """Return the system text that LLaMA-Factory makes of this one where it reads the `openai` format."""
    if tools:
        return f"{system}\n" if system else ""
    if "detailed thinking on" in system or _SHORT in system:
        return system
    return f"{system}\n{_SHORT}" if system else _SHORT

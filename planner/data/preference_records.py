"""Reads records of preferences: a prompt with a chosen and a rejected answer, or with one answer and a label that says
whether it is a good one. Does not import torch.

The prompt may be missing: then it is the common beginning of the two answers, as in TRL's `extract_prompt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from planner.data.pair_format import SIDES
from planner.data.records import Message, Record, conversation, tools_of, values_of
from planner.keys.source import shown

PreferenceKind = Literal["preference", "unpaired"]
_QUESTIONS = ("question", "instruction", "query", "input")
"""Columns that many datasets have in place of `prompt`."""
_ASK = ("user", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A prompt and answers to it that continue its text. `chosen`, `rejected`: None where the record has one answer."""

    prompt: str
    chosen: str | None = None
    rejected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """A conversation and answers to it, each a list of messages that continues it. `chosen`, `rejected`: None where the
    record has one answer."""

    prompt: list[Message]
    chosen: list[Message] | None = None
    rejected: list[Message] | None = None


def answers_of(kind: PreferenceKind, record: Record) -> Texts | Talks:
    """Return the prompt and the answers of a record, whose columns have offmate's names. Raises ValueError that says
    what is wrong with a broken record."""
    prompt, answers = parts_of(kind, record)
    if isinstance(prompt, str):
        return Texts(prompt=prompt, **answers)
    read = {side: conversation(messages) for side, messages in answers.items()}
    talks = Talks(prompt=conversation(prompt), **read)
    _check_turns(talks.prompt, read)
    tools_of(record), values_of(record)
    return talks


def parts_of(kind: PreferenceKind, record: Record) -> tuple[Any, dict[str, Any]]:
    """Return (the prompt, "chosen" or "rejected" -> the answer) as the record has them: all texts, or all lists.
    Raises ValueError for a record that lacks one of them or has other values, and for an empty answer."""
    if kind == "unpaired":
        answers = {"chosen" if _label(record) else "rejected": _answer(record, "completion")}
    else:
        answers = {side: _answer(record, side) for side in SIDES}
    answer, *others = answers.values()
    if any(isinstance(other, str) != isinstance(answer, str) for other in others):
        raise ValueError("one of chosen and rejected is text, and the other one is a list of messages")
    prompt = record.get("prompt")
    if prompt is None and kind == "unpaired":
        raise ValueError('column prompt is null or missing; write "" for an empty prompt')
    if prompt is None and isinstance(answer, str):
        _check_question(record)
    if prompt is None or (isinstance(prompt, str) and isinstance(answer, list) and kind == "preference"):
        return _extracted(answers, prompt)
    if not isinstance(prompt, (str, list)) or isinstance(prompt, str) != isinstance(answer, str):
        what = "text" if isinstance(answer, str) else "a list of messages"
        raise ValueError(f"the answer is {what}, so column prompt is, too; this is {shown(prompt, 80)}")
    return prompt, answers


def _answer(record: Record, column: str) -> Any:
    value = record.get(column)
    if value is None:
        raise ValueError(f"column {column} is null or missing")
    if not isinstance(value, (str, list)):
        raise ValueError(f"column {column} is text or a list of messages, this is {shown(value, 80)}")
    if not value:
        raise ValueError(f"column {column} is empty, and there is nothing to score")
    return value


def _label(record: Record) -> bool:
    label = record.get("label")
    if not isinstance(label, int) or label not in (0, 1):  # True and False are 1 and 0
        raise ValueError(f"column label is true or false (1 or 0), this is {shown(label, 80)}")
    return bool(label)


def _check_question(record: Record) -> None:
    """Raise ValueError where a text that is the prompt by its name would be left out."""
    for column in _QUESTIONS:
        if record.get(column):
            text = f"it has no prompt, and the column {column} would not be read: give columns: {{prompt: {column}}}"
            raise ValueError(
                f'{text} in its entry, or {{{column}: ""}} where chosen and rejected begin with the prompt'
            )


def _extracted(answers: dict[str, Any], said: str | None) -> tuple[Any, dict[str, Any]]:
    """Return the prompt with which both answers begin, and what follows it. `said`: the record's prompt where it is a
    text beside conversations, which must then contain it. Raises ValueError where there is no common beginning."""
    chosen, rejected = (answers[side] for side in SIDES)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    # TRL goes no further than the last item of the shorter answer, so that neither becomes empty.
    end = next((at for at, (one, other) in pairs if one != other), min(len(chosen), len(rejected)) - 1)
    if end and chosen[end - 1] == " ":
        end -= 1
    if not end:
        raise ValueError('chosen and rejected have no common beginning, which would be the prompt; "" is an empty one')
    prompt = chosen[:end]
    if said is not None and not any(_content(message) == said for message in prompt):
        raise ValueError(f"no message with which both answers begin is the text of column prompt, {shown(said, 80)}")
    return prompt, {"chosen": chosen[end:], "rejected": rejected[end:]}


def _content(message: object) -> object:
    return (message.get("content") or message.get("value")) if isinstance(message, dict) else None


def _check_turns(prompt: list[Message], answers: dict[str, list[Message]]) -> None:
    """Raise ValueError where an answer is not the assistant's, or a message says against what is always scored: the
    answers, and nothing else."""
    if (role := prompt[-1]["role"]) not in _ASK:
        raise ValueError(f"the prompt ends with a message of the {role}; an answer follows one of the user or a tool")
    for side, messages in answers.items():
        if (role := messages[0]["role"]) != "assistant":
            raise ValueError(f"the {side} answer begins with a message of the {role}, not of the assistant")
    if any(message.get("train") for message in prompt):
        raise ValueError("a message of the prompt is marked as learned; of preferences the answers alone are scored")
    if not all(message.get("train", True) for messages in answers.values() for message in messages):
        raise ValueError("a message of an answer is marked as not learned; of preferences whole answers are scored")

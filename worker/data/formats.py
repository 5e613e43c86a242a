"""The columns people's data has, and the text that is trained on for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from planner.job.data_entry import LearnedTurns, PromptFormat
from planner.job.dataset_words import ALPACA as ALPACA_PROMPT
from planner.job.records import (
    ALPACA,
    VALUES,
    Kind,
    Record,
    check_kind,
    conversation,
    history_of,
    segments_of,
    text_of,
    tools_of,
    values_of,
)
from worker.data.chat import ChatTemplate
from worker.data.turns import Spans

TrainOn = Literal["completions", "pairs", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to tokenize; `trained` are the spans of characters whose tokens are learned.

    `special` adds the tokenizer's own special tokens; `ended` adds the end-of-text token, learned if the text's end is.
    `everything`: all tokens are learned, those that the tokenizer adds among them.
    """

    text: str
    trained: Spans
    special: bool = True
    ended: bool = True
    everything: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How records become documents. `uses` are the columns read. `document` returns None for an empty record."""

    name: str
    uses: tuple[str, ...]
    document: Callable[[Record], Document | None]


def detect(
    kind: Kind, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, train_on: TrainOn,
    prompt: PromptFormat | None = None, system: bool = False, learned: LearnedTurns | None = None,
    values: Mapping[str, Any] | None = None,
) -> Format:  # fmt: skip
    """How records of a kind with these columns become documents; `train_on`: as in the job; `prompt`: how instructions
    are written, None for the chat template, or without one the Alpaca prompt; `system`: the column of that name begins
    conversations; `learned`: which turns of these, where the entry says that; `values`: what the chat template is told
    beside them, and beside the column `chat_template_kwargs`. Raises UserError."""
    everything = train_on == "all" or (train_on == "pairs" and kind not in ("prompt", "alpaca", "segments"))
    if learned is not None and everything:  # turns of every role, but for what the template writes around them
        learned, everything = replace(learned, roles=None), False

    @cache
    def template() -> ChatTemplate:
        whole_pairs = train_on == "pairs" and kind == "prompt"
        found = ChatTemplate(tokenizer, everything=everything or whole_pairs, learned=learned, values=values)
        found.warn_of_split_end(tokenizer)
        found.warn_of_answers()
        return found

    if kind == "alpaca":
        uses = tuple(column for column in (*ALPACA, "history") if column in columns)
        found = _alpaca(uses, template() if tokenizer.chat_template and prompt is None else None, prompt)
    elif kind in ("messages", "conversations"):
        first = ("system",) if system or kind == "conversations" else ()
        found = _chat(kind, template(), tuple(c for c in (*first, "tools", VALUES) if c in columns))
    elif kind == "prompt":
        more = tuple(column for column in ("tools", VALUES) if column in columns)
        found = _prompt_completion(template, more, pairs=train_on == "pairs")
    elif kind == "segments":
        found = Format(name="segments", uses=("segments",), document=_segments)
    else:
        found = Format(name="text", uses=("text",), document=_text)

    def document(record: Record) -> Document | None:
        check_kind(kind, record)
        made = found.document(record)
        return replace(made, everything=True) if everything and made is not None else made

    return replace(found, document=document)


def _text(record: Record) -> Document | None:
    text = text_of(record, "text")
    return Document(text=text, trained=((0, len(text)),)) if text else None


def _segments(record: Record) -> Document | None:
    text, spans = "", []
    for piece, learned in segments_of(record):
        if learned:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return Document(text=text, trained=tuple(spans), special=False, ended=False) if text else None


def _completion(prompt: str, completion: str) -> Document | None:
    if not completion:
        return None
    text = prompt + completion
    return Document(text=text, trained=((len(prompt), len(text)),))


def _prompt_completion(template: Callable[[], ChatTemplate], more: tuple[str, ...], *, pairs: bool) -> Format:
    """`template`: made for the first record that is a conversation."""

    def document(record: Record) -> Document | None:
        if not isinstance(record.get("prompt"), list):
            return _completion(text_of(record, "prompt"), text_of(record, "completion"))
        chat, tools = template().told(values_of(record)), tools_of(record)
        prompt, completion = conversation(record["prompt"]), conversation(record.get("completion"))
        if pairs:
            text, spans = chat.pair(prompt, completion, tools)
        else:
            text, spans = chat.render([*(message | {"train": False} for message in prompt), *completion], tools)
        return Document(text=text, trained=spans, special=False, ended=False)

    return Format(name="prompt and completion", uses=("prompt", "completion", *more), document=document)


def _chat(column: str, template: ChatTemplate, more: tuple[str, ...]) -> Format:
    def document(record: Record) -> Document | None:
        if not record.get(column):
            return None
        messages = conversation(record[column])
        if "system" in more and (first := text_of(record, "system")) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": first})
        text, spans = template.told(values_of(record)).render(messages, tools_of(record))
        return Document(text=text, trained=spans, special=False, ended=False)

    return Format(name="conversations under the chat template", uses=(column, *more), document=document)


def _alpaca(uses: tuple[str, ...], template: ChatTemplate | None, prompt: PromptFormat | None) -> Format:
    if template is not None:

        def chat(record: Record) -> Document | None:
            instruction, more, output = (text_of(record, c) for c in ("instruction", "input", "output"))
            if not output:
                return None
            messages = [
                *history_of(record),
                {"role": "user", "content": "\n".join(filter(None, (instruction, more)))},
                {"role": "assistant", "content": output},
            ]
            if system := text_of(record, "system"):
                messages.insert(0, {"role": "system", "content": system})
            text, spans = template.render(messages)
            return Document(text=text, trained=spans, special=False, ended=False)

        return Format(name="instructions (alpaca) under the chat template", uses=uses, document=chat)

    written = prompt or PromptFormat.model_validate(ALPACA_PROMPT)

    def plain(record: Record) -> Document | None:
        if record.get("history"):
            raise ValueError("a history of turns needs a chat template, not a prompt of its own")
        system = text_of(record, "system")
        text = written.written(text_of(record, "instruction"), text_of(record, "input"), system)
        if system and "{system}" not in written.without_input:
            text = f"{system}\n\n{text}"
        return _completion(text, text_of(record, "output"))

    alpaca = "the alpaca prompt" if written.model_dump() == ALPACA_PROMPT | {"system": ""} else "a prompt of their own"
    return Format(name=f"instructions under {alpaca}", uses=uses, document=plain)

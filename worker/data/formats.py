"""The columns people's data has, and the text that is trained on for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from planner.job.records import ALPACA, Kind, Record, conversation, history_of, kind_of, text_of, tools_of
from worker.data.chat import ChatTemplate, Spans

TrainOn = Literal["completions", "pairs", "all"]
_ALPACA = (
    "Below is an instruction that describes a task{more}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
)


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


def detect(columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, name: str, *, train_on: TrainOn) -> Format:
    """The format that the columns of the dataset `name` show; `train_on`: as in the job. Raises UserError listing what
    was found."""
    kind = kind_of(columns, name)
    everything = train_on == "all" or (train_on == "pairs" and kind not in ("prompt", "alpaca"))
    found = _format(kind, columns, tokenizer, everything=everything, pairs=train_on == "pairs")
    if not everything:
        return found

    def whole(record: Record) -> Document | None:
        document = found.document(record)
        return replace(document, everything=True) if document is not None else None

    return replace(found, document=whole)


def _format(
    kind: Kind, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, everything: bool, pairs: bool
) -> Format:
    if kind in ("messages", "conversations"):
        more = ("system", "tools") if kind == "conversations" else ("tools",)
        return _chat(kind, tokenizer, tuple(column for column in more if column in columns), everything)
    if kind == "prompt":
        tools = tuple(column for column in ("tools",) if column in columns)
        return _prompt_completion(tokenizer, tools, everything, pairs)
    if kind == "alpaca":
        return _alpaca(tokenizer, tuple(column for column in (*ALPACA, "history") if column in columns), everything)
    return Format(name="text", uses=("text",), document=_text)


def _text(record: Record) -> Document | None:
    text = text_of(record, "text")
    return Document(text=text, trained=((0, len(text)),)) if text else None


def _completion(prompt: str, completion: str) -> Document | None:
    if not completion:
        return None
    text = prompt + completion
    return Document(text=text, trained=((len(prompt), len(text)),))


def _prompt_completion(
    tokenizer: PreTrainedTokenizerBase, more: tuple[str, ...], everything: bool, pairs: bool
) -> Format:
    template: list[ChatTemplate] = []  # made for the first record that is a conversation

    def document(record: Record) -> Document | None:
        if not isinstance(record.get("prompt"), list):
            return _completion(text_of(record, "prompt"), text_of(record, "completion"))
        if not template:
            template.append(ChatTemplate(tokenizer, everything=everything or pairs))
        if pairs:
            prompt, completion = conversation(record["prompt"]), conversation(record.get("completion"))
            text, spans = template[0].pair(prompt, completion, tools_of(record))
            return Document(text=text, trained=spans, special=False, ended=False)
        prompt = [message | {"train": False} for message in conversation(record["prompt"])]
        text, spans = template[0].render([*prompt, *conversation(record.get("completion"))], tools_of(record))
        return Document(text=text, trained=spans, special=False, ended=False)

    return Format(name="prompt and completion", uses=("prompt", "completion", *more), document=document)


def _chat(column: str, tokenizer: PreTrainedTokenizerBase, more: tuple[str, ...], everything: bool) -> Format:
    template = ChatTemplate(tokenizer, everything=everything)

    def document(record: Record) -> Document | None:
        if not record.get(column):
            return None
        messages = conversation(record[column])
        if "system" in more and (first := text_of(record, "system")) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": first})
        text, spans = template.render(messages, tools_of(record))
        return Document(text=text, trained=spans, special=False, ended=False)

    return Format(name="conversations under the chat template", uses=(column, *more), document=document)


def _alpaca(tokenizer: PreTrainedTokenizerBase, uses: tuple[str, ...], everything: bool) -> Format:
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer, everything=everything)

        def chat(record: Record) -> Document | None:
            instruction, more, output = (text_of(record, c) for c in ("instruction", "input", "output"))
            if not output:
                return None
            messages = [
                *history_of(record),
                {"role": "user", "content": f"{instruction}\n{more}" if more else instruction},
                {"role": "assistant", "content": output},
            ]
            if system := text_of(record, "system"):
                messages.insert(0, {"role": "system", "content": system})
            text, spans = template.render(messages)
            return Document(text=text, trained=spans, special=False, ended=False)

        return Format(name="instructions (alpaca) under the chat template", uses=uses, document=chat)

    def plain(record: Record) -> Document | None:
        if record.get("history"):
            raise ValueError("a history of turns needs a chat template, and the tokenizer has none")
        more = text_of(record, "input")
        pair = ", paired with an input that provides further context" if more else ""
        prompt = _ALPACA.format(more=pair, instruction=text_of(record, "instruction"))
        prompt += f"### Input:\n{more}\n\n" if more else ""
        if system := text_of(record, "system"):
            prompt = f"{system}\n\n{prompt}"
        return _completion(f"{prompt}### Response:\n", text_of(record, "output"))

    return Format(name="instructions (alpaca) under the alpaca prompt", uses=uses, document=plain)

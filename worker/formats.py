"""The columns people's data has, and the text that is trained on for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from worker.chat import ChatTemplate, Spans, conversation

Record = Mapping[str, object]

_ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip

_ALPACA = (
    "Below is an instruction that describes a task{more}. "
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to tokenize; `trained` are the spans of characters whose tokens are learned.

    `special` adds the tokenizer's own special tokens; `ended` adds the end-of-text token, learned if the text's end is.
    """

    text: str
    trained: Spans
    special: bool = True
    ended: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How records become documents. `uses` are the columns read. `document` returns None for an empty record."""

    name: str
    uses: tuple[str, ...]
    document: Callable[[Record], Document | None]


def detect(columns: Sequence[str], tokenizer: PreTrainedTokenizerBase, name: str) -> Format:
    """The format that the columns of the dataset `name` show. Raises UserError listing what was found."""
    has = set(columns)
    for column in ("messages", "conversations"):
        if column in has:
            return _chat(column, tokenizer, system="system" in has and column == "conversations")
    if {"prompt", "completion"} <= has:
        return _prompt_completion(tokenizer)
    if {"instruction", "output"} <= has:
        return _alpaca(tokenizer, tuple(c for c in ("system", "instruction", "input", "output") if c in has))
    if "text" in has:
        return Format(name="text", uses=("text",), document=_text)
    raise UserError(
        f"The columns of {name} are not a format that is known.", code="unknown-columns", exit_code=Exit.USAGE,
        numbers=(
            f"found: {', '.join(columns)}",
            "known: text | messages | conversations | prompt, completion | instruction, (input,) output",
        ),
        hint="rename the columns of the data to one of these sets",
    )  # fmt: skip


def _string(record: Record, column: str) -> str:
    value = record.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"column {column} is text, this is {str(value)[:80]!r}")
    return value


def _text(record: Record) -> Document | None:
    text = _string(record, "text")
    return Document(text=text, trained=((0, len(text)),)) if text else None


def _completion(prompt: str, completion: str) -> Document | None:
    if not completion:
        return None
    text = prompt + completion
    return Document(text=text, trained=((len(prompt), len(text)),))


def _prompt_completion(tokenizer: PreTrainedTokenizerBase) -> Format:
    template: list[ChatTemplate] = []  # made for the first record that is a conversation

    def document(record: Record) -> Document | None:
        if not isinstance(record.get("prompt"), list):
            return _completion(_string(record, "prompt"), _string(record, "completion"))
        if not template:
            template.append(ChatTemplate(tokenizer))
        prompt = conversation(record["prompt"], _ROLES.get)
        text, spans = template[0].render([*prompt, *conversation(record.get("completion"), _ROLES.get)])
        past = sum(message["role"] == "assistant" for message in prompt)
        return Document(text=text, trained=spans[past:], special=False, ended=False)

    return Format(name="prompt and completion", uses=("prompt", "completion"), document=document)


def _chat(column: str, tokenizer: PreTrainedTokenizerBase, *, system: bool) -> Format:
    template = ChatTemplate(tokenizer)

    def document(record: Record) -> Document | None:
        if not record.get(column):
            return None
        messages = conversation(record[column], _ROLES.get)
        if system and (first := _string(record, "system")) and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": first})
        text, spans = template.render(messages)
        return Document(text=text, trained=spans, special=False, ended=False)

    uses = (column, "system") if system else (column,)
    return Format(name="conversations under the chat template", uses=uses, document=document)


def _alpaca(tokenizer: PreTrainedTokenizerBase, uses: tuple[str, ...]) -> Format:
    if tokenizer.chat_template:
        template = ChatTemplate(tokenizer)

        def chat(record: Record) -> Document | None:
            instruction, more, output = (_string(record, c) for c in ("instruction", "input", "output"))
            if not output:
                return None
            messages = [
                {"role": "user", "content": f"{instruction}\n{more}" if more else instruction},
                {"role": "assistant", "content": output},
            ]
            if system := _string(record, "system"):
                messages.insert(0, {"role": "system", "content": system})
            text, spans = template.render(messages)
            return Document(text=text, trained=spans, special=False, ended=False)

        return Format(name="instructions (alpaca) under the chat template", uses=uses, document=chat)

    def plain(record: Record) -> Document | None:
        more = _string(record, "input")
        pair = ", paired with an input that provides further context" if more else ""
        prompt = _ALPACA.format(more=pair, instruction=_string(record, "instruction"))
        prompt += f"### Input:\n{more}\n\n" if more else ""
        if system := _string(record, "system"):
            prompt = f"{system}\n\n{prompt}"
        return _completion(f"{prompt}### Response:\n", _string(record, "output"))

    return Format(name="instructions (alpaca) under the alpaca prompt", uses=uses, document=plain)

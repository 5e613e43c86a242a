"""Turns the records of a dataset into documents to be tokenized, according to the columns that the data have."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from planner.data.entry import ALPACA as ALPACA_PROMPT
from planner.data.entry import Formatting, LearnedTurns, PromptFormat
from planner.data.records import (
    ALPACA,
    Kind,
    Record,
    TrainOn,
    check_answers,
    check_kind,
    conversation,
    history_of,
    pair_of,
    segments_of,
    text_of,
    tokens_of,
    tools_of,
    values_of,
)
from planner.errors import Exit, UserError, first_line
from planner.importers.llama_factory_records import LeftOut, read
from planner.importers.llama_factory_templates import PARSED, PREFIX, SlotTemplate, slot_template
from planner.keys.fields import VALUES
from planner.keys.source import shown
from planner.units import counted
from worker.data.bounds import bounded
from worker.data.chat import ChatTemplate
from worker.data.chat_turns import Spans
from worker.data.slots import Piece, Slots, check_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text to tokenize. `trained`: the spans of its characters whose tokens are learned.

    `special`: add the tokenizer's own special tokens. `ended`: add the end-of-text token, and learn it if the text's
    end is learned. `everything`: learn all tokens, including those that the tokenizer adds. `pieces`, if any, replace
    the text: texts that are tokenized one by one, or token ids, each learned or not. `rows`, if any, replace both,
    where a record makes several rows: the pieces of each row. `place`: where the record stands in the data, in
    words."""

    text: str
    trained: Spans
    special: bool = True
    ended: bool = True
    everything: bool = False
    pieces: tuple[Piece, ...] = ()
    rows: tuple[tuple[Piece, ...], ...] = ()
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A way to turn records into documents. `uses`: the columns that it reads. `document`: makes a record's document;
    returns None for an empty record, and for a record that is left out, which it counts in `left_out` under the
    reason."""

    name: str
    uses: tuple[str, ...]
    document: Callable[[Record], Document | None]
    left_out: Counter[str] = field(default_factory=Counter)

    def say_left_out(self, data: str) -> None:
        """Log how many records of `data` were left out, and why."""
        for why, count in self.left_out.items():
            log.warning("data: %s: %s left out, as LLaMA-Factory does: %s", data, counted(count, "conversation"), why)


def detect(
    kind: Kind,
    columns: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    train_on: TrainOn,
    prompt: PromptFormat | None = None,
    system: bool = False,
    learned: LearnedTurns | None = None,
    values: Mapping[str, Any] | None = None,
    slots: str | None = None,
    formatting: Formatting | None = None,
    begin: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Format:
    """The format by which records of this kind with these columns become documents. Raises UserError where none fits.

    `train_on`: as in the job. `prompt`: how instructions are written; None for the chat template or, without one, the
    Alpaca prompt. `system`: the column `system` gives the first message of conversations. `learned`: which messages are
    learned, where the dataset's entry says so. `values`: variables for the chat template, beside messages and the
    column `chat_template_kwargs`. `slots`: the job's `chat_template`, which may name one of LLaMA-Factory's.
    `formatting`: read the data as LLaMA-Factory reads them, in this form; texts then begin with the token id
    `begin`. `names`: the names that columns have in the data, where these are others."""
    if kind == "text" and formatting is not None:
        return _slot_text(begin, _end_of_texts(slots, tokenizer))
    if slot_template(slots) is not None and prompt is None and kind not in ("text", "segments", "tokens"):
        written = slots_of(slots, tokenizer, everything=train_on == "all", values=values or {})
        return _slot_chat(kind, columns, written, formatting, everything=train_on == "all")
    everything = train_on == "all" or (train_on == "pairs" and kind not in ("prompt", "alpaca", "segments"))
    everything &= kind != "tokens"  # their labels say what is learned
    if learned is not None and everything:  # turns of every role, without what the template writes around them
        learned, everything = replace(learned, roles=None), False

    @cache
    def template() -> ChatTemplate:
        whole_pairs = train_on == "pairs" and kind == "prompt"
        chat = ChatTemplate(tokenizer, everything=everything or whole_pairs, learned=learned, values=values)
        chat.warn_of_split_end(tokenizer)
        chat.warn_of_answers()
        return chat

    if kind == "alpaca":
        uses = tuple(column for column in (*ALPACA, "history") if column in columns)
        form = _alpaca(uses, template() if tokenizer.chat_template and prompt is None else None, prompt)
    elif kind in ("messages", "conversations"):
        first = ("system",) if system or kind == "conversations" else ()
        more = tuple(column for column in (*first, "tools", "functions", VALUES) if column in columns)
        form = _chat(kind, template(), more, begins_with_system=bool(first))
    elif kind == "prompt":
        more = tuple(column for column in ("tools", "functions", VALUES) if column in columns)
        form = _prompt_completion(template, more, train_on, _joined(names or {}) if tokenizer.chat_template else None)
    elif kind == "tokens":
        form = _tokens(len(tokenizer), prompts=train_on == "all")
    elif kind == "segments":
        form = Format(name="segments", uses=("segments",), document=_segments)
    else:
        form = Format(name="text", uses=("text",), document=_text)

    uses = tuple(column for column in form.uses if column in columns or kind != "tokens")

    def document(record: Record) -> Document | None:
        check_kind(kind, record)
        result = form.document(record)
        if result is not None:
            check_answers(train_on, kind, record)
        return replace(result, everything=True) if everything and result is not None else result

    return replace(form, document=document, uses=uses)


def slots_of(
    slots: str | None, tokenizer: PreTrainedTokenizerBase, *, everything: bool, values: Mapping[str, Any]
) -> Callable[[], Slots]:
    """A function that returns the template of LLaMA-Factory's that `slots`, the job's `chat_template`, names. Its first
    call raises UserError for a tokenizer that the template does not fit. `everything`, `values`: as for `Slots`."""

    @cache
    def written() -> Slots:
        of_tokenizer = slots == PARSED and tokenizer.chat_template
        template = parsed_slots(tokenizer) if of_tokenizer else slot_template(slots)
        assert template is not None
        name = "its own chat template" if of_tokenizer else str(slots).removeprefix(PREFIX)
        return Slots(template, name, tokenizer, everything=everything, values=values)

    return written


def _end_of_texts(slots: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """The end token that LLaMA-Factory writes behind each text of `stage: pt`: the one that the template sets, or else
    the tokenizer's own. Raises UserError where the template's is no token of the tokenizer."""
    named = slot_template(slots)
    end = "<|end_of_text|>" if slots == f"{PREFIX}llama3" else named.stops[0] if named and named.replaces_eos else None
    if end is not None:
        check_tokens(tokenizer, (end,), str(slots).removeprefix(PREFIX))
    return end or tokenizer.eos_token or ""


def _slot_text(begin: int | None, end: str) -> Format:
    """The format of LLaMA-Factory's `stage: pt`: the end token is part of the text, and no other is added."""
    first: tuple[Piece, ...] = ((begin, True),) if begin is not None else ()

    def document(record: Record) -> Document | None:
        text = text_of(record, "text") + end
        return Document(text="", trained=(), special=False, pieces=(*first, (text, True))) if text else None

    return Format(name="text", uses=("text",), document=document)


def _slot_chat(
    kind: Kind, columns: Sequence[str], slots: Callable[[], Slots], formatting: Formatting | None, *, everything: bool
) -> Format:
    """The format of conversations under LLaMA-Factory's templates. `slots`: called for the first record that is a
    conversation. `everything`: all of a prompt and completion that are texts is learned, too."""
    left_out: Counter[str] = Counter()

    def document(record: Record) -> Document | None:
        if kind == "prompt" and not isinstance(record.get("prompt"), list):
            pair = _completion(*pair_of(record))
            return pair and replace(pair, everything=everything)
        conversation = read(kind, record, formatting)
        if isinstance(conversation, LeftOut):
            left_out[conversation.why] += 1
            return None
        return Document(text="", trained=(), special=False, ended=False, pieces=slots().pieces(conversation))

    wanted = {"alpaca": (*ALPACA, "history", "tools"), "prompt": ("prompt", "completion", "tools")}
    uses = tuple(column for column in wanted.get(kind, (kind, "system", "tools")) if column in columns)
    return Format(name=f"{kind} under a template of LLaMA-Factory's", uses=uses, document=document, left_out=left_out)


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


def _tokens(vocabulary: int, *, prompts: bool) -> Format:
    def document(record: Record) -> Document | None:
        tokens, learned = tokens_of(record, prompts=prompts)
        if strange := next((token for token in tokens if not 0 <= token < vocabulary), None):
            raise ValueError(f"input_ids has {strange}, and the tokenizer has the tokens 0 to {vocabulary - 1}")
        return Document(text="", trained=(), pieces=tuple(zip(tokens, learned, strict=True))) if tokens else None

    uses = ("input_ids", "labels", "attention_mask", "completion_mask", "assistant_masks")
    return Format(name="tokens", uses=uses, document=document)


def _completion(prompt: str, completion: str) -> Document | None:
    if not completion:
        return None
    text = prompt + completion
    return Document(text=text, trained=((len(prompt), len(text)),))


def _joined(names: Mapping[str, str]) -> str:
    """A note on texts that are joined although the tokenizer has a chat template."""
    columns = f"{{instruction: {names.get('prompt', 'prompt')}, output: {names.get('completion', 'completion')}}}"
    return (
        "prompts and completions are joined as they are, without the model's chat template; to use it, give type: "
        f"instructions and columns: {columns}"
    )


def _prompt_completion(
    template: Callable[[], ChatTemplate], more: tuple[str, ...], train_on: TrainOn, joined: str | None
) -> Format:
    """The format of prompts with completions. `template`: called for the first record that is a conversation.
    `joined`: a note to log at the first record of texts."""

    def document(record: Record) -> Document | None:
        nonlocal joined
        if not isinstance(record.get("prompt"), list):
            if joined is not None:
                log.warning("data: %s", joined)
                joined = None
            return _completion(*pair_of(record))
        chat, tools = template().told(values_of(record)), tools_of(record)
        prompt, completion = conversation(record["prompt"]), conversation(record.get("completion"))
        if train_on == "pairs":
            text, spans = chat.pair(prompt, completion, tools)
        elif train_on == "completions":
            text, spans = chat.render([*(message | {"train": False} for message in prompt), *completion], tools)
        else:
            text, spans = chat.render([*prompt, *completion], tools)
        if train_on == "answers":  # only the parts of answers that are in the completion, as in TRL
            ((begin, _),) = chat.pair(prompt, completion, tools)[1]
            spans = tuple((max(begin, start), end) for start, end in spans if end > begin)
        return Document(text=text, trained=spans, special=False, ended=False)

    return Format(name="prompt and completion", uses=("prompt", "completion", *more), document=document)


def _chat(column: str, template: ChatTemplate, more: tuple[str, ...], *, begins_with_system: bool) -> Format:
    """The format of conversations in `column`. `more`: other columns that are read, as far as the beginning of the data
    has them; records may have them later."""

    def document(record: Record) -> Document | None:
        if not record.get(column):
            return None
        messages = conversation(record[column])
        first = text_of(record, "system") if begins_with_system else ""
        if first and messages[0]["role"] != "system":
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


# ---- derives LLaMA-Factory's template from the tokenizer's own chat template, for a file that names no template


_CONTENT = "{{content}}"


def parsed_slots(tokenizer: PreTrainedTokenizerBase) -> SlotTemplate:
    """The template, in LLaMA-Factory's form, that LLaMA-Factory (0.9.6, `parse_template`) derives from the tokenizer's
    chat template. Raises UserError "no-chat-template" where it cannot derive one."""
    try:
        with bounded():
            return _parsed(tokenizer)
    except UserError:
        raise
    except Exception as error:  # a template may raise anything
        raise UserError(
            "LLaMA-Factory cannot derive a template from the tokenizer's chat template.",
            code="no-chat-template",
            exit_code=Exit.USAGE,
            numbers=(f"{type(error).__name__}: {first_line(error)}",),
            hint="name one: template: qwen3, or another of LLaMA-Factory's",
        ) from error


def _parsed(tokenizer: PreTrainedTokenizerBase) -> SlotTemplate:
    prefix = str(tokenizer.decode(tokenizer.encode("")))

    def text(*turns: tuple[str, str], asks: bool) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        shown: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
        return str(shown)[len(prefix) :]

    system = text(("system", _CONTENT), asks=False)
    bare_user = text(("system", ""), ("user", _CONTENT), asks=True)
    user = text(("user", _CONTENT), asks=True)
    assistant = text(("user", _CONTENT), ("assistant", _CONTENT), asks=False)[len(user) :]
    reasons = "<think>" in assistant
    assistant = assistant.replace("<think>", "").replace("</think>", "").lstrip("\n")
    default = ""
    if len(user) > len(bare_user):  # the template adds a default system text
        default = _more(bare_user, user)
        user = user[len(system.replace(_CONTENT, default, 1)) :]
    if missing := [text for text in (system, user, assistant) if _CONTENT not in text]:
        raise ValueError(f"it does not show what is said: {shown(missing[0])}")
    return SlotTemplate(
        prefix=prefix, system=system, user=user, assistant=assistant, default_system=default, reasons=reasons
    )


def _more(short: str, long: str) -> str:
    """The characters of `long` that remain when those of `short` are matched in order; ends with the last match."""
    at, more = 0, ""
    for char in long:
        if at == len(short):
            break
        if short[at] == char:
            at += 1
        else:
            more += char
    return more

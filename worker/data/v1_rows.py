"""Makes rows as LLaMA-Factory's v1 does: each row is a conversation up to one of its answers. The answer is learned,
with all that the tokenizer's chat template writes after it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any

from transformers import PreTrainedTokenizerBase

from planner.data.entry import DataEntry
from planner.data.records import Record
from planner.errors import Exit, UserError
from planner.importers.llama_factory_v1_records import Part, Said, Talk, talk_of, times_taken
from worker.data.chat import ChatTemplate
from worker.data.formats import Document, Format
from worker.data.slots import Piece
from worker.data.sources import Source

_BREAK = "\u200b"
"""A zero-width space. v1 puts it behind the first character of a text that would be a special token."""


def format_of(
    entry: DataEntry,
    columns: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    values: Mapping[str, Any],
    source: Source | None,
) -> Format:
    """The format by which records of a dataset with a `converter` (of LLaMA-Factory's v1) become documents. `columns`:
    under offmate's names. `values`: variables of the chat template, beside the messages. `source`: all of the dataset's
    records, from which a sample is drawn if the entry asks for one; None: all records are taken. Raises UserError for
    an entry that does not suit its converter."""
    converter = entry.converter
    assert converter is not None

    @cache
    def rows() -> _Rows:
        return _Rows(tokenizer, values)

    taken: Iterator[int] = repeat(1)
    if entry.draw is not None and source is not None:
        records = (entry.mapped(row.record) for row in source.rows() if row.record is not None)
        taken = iter(times_taken(entry.draw, converter, records))
    left_out: Counter[str] = Counter()

    def document(record: Record) -> Document | None:
        talk = talk_of(converter, record)
        times = [(many, next(taken)) for many in talk.rows]
        repeated = [[rows().of(talk, many)] * count for many, count in times if count]
        if not repeated:
            left_out["size and weight of their dataset drew others"] += 1
            return None
        return Document(text="", trained=(), special=False, ended=False, rows=tuple(chain.from_iterable(repeated)))

    wanted = ("system", "instruction", "input", "output") if converter == "alpaca" else ("messages", "tools")
    uses = tuple(column for column in wanted if column in columns)
    return Format(name="rows of LLaMA-Factory's v1", uses=uses, document=document, left_out=left_out)


class _Rows:
    """Writes rows with a tokenizer's chat template. Raises UserError where the tokenizer has none for conversations."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, everything=True, values=values)
        self._template.warn_of_split_end(tokenizer)
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._ids = special.keys()
        self._marks = sorted((mark for mark in special.values() if len(mark) > 1), key=len, reverse=True)

    def of(self, talk: Talk, many: int) -> tuple[Piece, ...]:
        """The pieces (token ids, each learned or not) of the row made of the first `many` messages of `talk`, whose
        last one is the answer. Raises ValueError or UserError where the answer's place in the text cannot be
        determined."""
        *context, answer = (self._broken_up(said).told() for said in talk.messages[:many])
        tools = json.loads(self._safe(talk.tools)) if talk.tools else None
        if tools is not None and not isinstance(tools, list):
            tools = [tools]
        template = self._template.told({"enable_thinking": bool(answer.get("reasoning_content"))})
        before, text = template.asked(context, answer, tools)
        prompt, ids = self._tokenizer([before, text], add_special_tokens=False, verbose=False)["input_ids"]
        if ids[: len(prompt)] != prompt:
            raise ValueError(
                "the chat template writes what stands before an answer otherwise where there is none, at which "
                "LLaMA-Factory's v1 stops"
            )
        learned = talk.messages[many - 1].learned
        return tuple((token, learned and place >= len(prompt)) for place, token in enumerate(ids))

    def _broken_up(self, said: Said) -> Said:
        """The message with the special tokens in what it says broken up."""
        parts: list[Part] = []
        for kind, value in said.parts:
            if kind == "tool_call":
                call = json.loads(value)
                call["arguments"] = {
                    name: self._safe(text) if isinstance(text, str) else text
                    for name, text in call["arguments"].items()
                }
                parts.append((kind, json.dumps(call)))
            else:
                parts.append((kind, self._safe(value)))
        return Said(role=said.role, parts=tuple(parts), learned=said.learned)

    def _safe(self, text: str) -> str:
        if not any(mark in text for mark in self._marks):
            return text
        for mark in self._marks:
            text = text.replace(mark, f"{mark[0]}{_BREAK}{mark[1:]}")
        if self._ids & {*self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]}:
            raise ValueError("it has a special token in its text, which cannot be broken up, as in LLaMA-Factory's v1")
        return text


def refuse_pairs(entry: DataEntry) -> UserError:
    """Make the UserError "no-pairs", for an encoder-decoder whose dataset has a `converter`."""
    return UserError(
        f"{entry.path} has a converter of LLaMA-Factory's v1, which makes no pairs for an encoder-decoder.",
        code="no-pairs",
        exit_code=Exit.USAGE,
        hint="give prompts with completions, without converter",
    )

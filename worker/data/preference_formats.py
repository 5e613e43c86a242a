"""Turns records of preferences into rows of tokens: each answer behind its prompt, of which the answer is scored.

Where an answer begins among the tokens is decided as in TRL (1.16): by its DPOTrainer and KTOTrainer for the losses of
these, by its ORPOTrainer and CPOTrainer, which do it in another way, for the others. Under one of LLaMA-Factory's
templates it is decided as there."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from planner.data.entry import DataEntry
from planner.data.preference_records import PreferenceKind, Talks, Texts, answers_of
from planner.data.records import ALPACA, Message, Record, is_chat, tools_of, values_of
from planner.errors import Exit, UserError
from planner.importers.llama_factory_records import LeftOut, Pair, read_pair
from planner.importers.llama_factory_templates import slot_template
from planner.job.schema import Job
from planner.keys.fields import VALUES
from planner.keys.source import shown
from worker.data.chat import ChatTemplate
from worker.data.formats import Document, Format, slots_of
from worker.data.slots import Piece, Slots

log = logging.getLogger(__name__)

Row = tuple[tuple[int, bool], ...]
"""(token id, whether it is scored) of each token; () where the record has no such answer."""
_OLDER = frozenset({"orpo", "cpo", "simpo"})
"""The losses whose trainers in TRL tokenize prompts and answers without the tokenizer's special tokens and then add the
first and the last token."""
_MARGIN = "margin"
"""The column of pairs whose numbers TRL's RewardTrainer subtracts."""
_QUESTION = {"role": "user", "content": "[[dummy_message]]"}
"""The message behind which axolotl writes answers that are "apart"."""


def preference_format(
    job: Job, entry: DataEntry, kind: PreferenceKind, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Format:
    """The format by which records of preferences become documents of two rows: the chosen and the rejected answer, each
    behind its prompt. A row is empty where a record has no such answer. `columns`: the records' columns, under
    offmate's names. Raises UserError for settings that these records do not take, and for records with settings that
    are not there."""
    if job.rewards and _MARGIN in columns and entry.pair_format is None:
        raise UserError(
            f"{entry.path} has a column {_MARGIN}, which TRL subtracts from a pair's difference of rewards; that is "
            "not supported yet.",
            code="not-there",
            exit_code=Exit.USAGE,
            hint=f"leave that column out, or give the data's entry columns: {{{_MARGIN}: ''}}",
        )
    values = {**(job.chat_template_kwargs or {}), **(entry.chat_template_kwargs or {})}
    if entry.pair_format is not None and entry.pair_format.written is not None and values:
        raise UserError(
            "axolotl gives the chat template no chat_template_kwargs where it writes preferences.",
            code="not-there",
            exit_code=Exit.USAGE,
            numbers=(f"given: {', '.join(values)}",),
            hint=f"leave chat_template_kwargs out, or the type of {entry.path}'s entry",
        )

    @cache
    def template() -> ChatTemplate:
        chat = ChatTemplate(tokenizer, everything=True, values=values)
        chat.warn_of_split_end(tokenizer)
        return chat

    slots = None
    if slot_template(job.chat_template) is not None and entry.pair_format is None:
        slots = slots_of(job.chat_template, tokenizer, everything=False, values=values)
    writer = _Writer(tokenizer, str(job.preference), template, entry.pair_format.written if entry.pair_format else None)
    left_out: Counter[str] = Counter()

    def document(record: Record) -> Document | None:
        if slots is None or (entry.formatting is None and not is_chat(kind, record)):
            read = answers_of(kind, record)
            return _document(*(writer.talks(read, record) if isinstance(read, Talks) else writer.texts(read)))
        pair = read_pair(kind, record, entry.formatting)
        if isinstance(pair, LeftOut):
            left_out[pair.why] += 1
            return None
        return _document(*_slot_rows(slots(), pair, tokenizer))

    uses = _uses(entry, kind, columns, system=slots is not None)
    return Format(name=_NAMES[kind], uses=uses, document=document, left_out=left_out)


_NAMES = {"preference": "pairs of a chosen and a rejected answer", "unpaired": "answers with a label"}


def _uses(entry: DataEntry, kind: PreferenceKind, columns: Sequence[str], *, system: bool) -> tuple[str, ...]:
    """Those of the columns that are read, under offmate's names. `system`: that one is."""
    if entry.pair_format is not None:
        used: frozenset[str] | set[str] = entry.pair_format.columns
    elif entry.formatting is not None:
        used = {*ALPACA, "history", "messages", "chosen", "rejected", "label", "tools"}
    else:
        answers = ("chosen", "rejected") if kind == "preference" else ("completion", "label")
        used = {"prompt", *answers, "tools", "functions", VALUES, *(("system",) if system else ())}
    return tuple(column for column in columns if column in used)


def _document(chosen: Row, rejected: Row) -> Document:
    return Document(text="", trained=(), special=False, ended=False, rows=(chosen, rejected))


def _slot_rows(slots: Slots, pair: Pair, tokenizer: PreTrainedTokenizerBase) -> tuple[Row, Row]:
    """The rows of a pair under a template of LLaMA-Factory's, which takes the prompt of both from the chosen one."""
    answers = {"chosen": pair.chosen, "rejected": pair.rejected}
    written = {side: slots.answer(pair.conversation, turn) for side, turn in answers.items() if turn is not None}
    before = _tokens(tokenizer, next(iter(written.values()))[0])
    return _both({side: (*before, *_tokens(tokenizer, behind)) for side, (_, behind) in written.items()})


def _tokens(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[Piece]) -> Row:
    """The tokens of pieces that are tokenized one by one."""
    tokens: list[tuple[int, bool]] = []
    for piece, scored in pieces:
        ids = (
            tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            if isinstance(piece, str)
            else [piece]
        )
        tokens += [(token, scored) for token in ids]
    return tuple(tokens)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes prompts and answers as rows. `loss`: the job's `preference`. `template`: called for the first record that
    is a conversation. `written`: as in `PairFormat`."""

    tokenizer: PreTrainedTokenizerBase
    loss: str
    template: Callable[[], ChatTemplate]
    written: str | None

    def texts(self, texts: Texts) -> tuple[Row, Row]:
        """The rows of a prompt and answers that are texts."""
        answers = {"chosen": texts.chosen, "rejected": texts.rejected}
        given = {side: text for side, text in answers.items() if text is not None}
        if self.loss in _OLDER:
            return self._older(texts.prompt, given)
        end = self.tokenizer.eos_token or ""
        given = {side: text if text.endswith(end) else text + end for side, text in given.items()}
        whole = {side: self._ids(texts.prompt + text, special=True) for side, text in given.items()}
        return self._rows(self._ids(texts.prompt, special=True), whole)

    def talks(self, talks: Talks, record: Record) -> tuple[Row, Row]:
        """The rows of a conversation and answers that are messages. `record`: may have tools and variables for the chat
        template."""
        template, tools = self.template().told(values_of(record)), tools_of(record)
        answers = {"chosen": talks.chosen, "rejected": talks.rejected}
        given = {side: messages for side, messages in answers.items() if messages is not None}
        if self.written == "apart":
            ((before, _), *_) = [template.answered(talks.prompt, messages) for messages in given.values()]
            return self.texts(Texts(prompt=before, **{k: _apart(template, m) for k, m in given.items()}))
        both = {side: template.answered(talks.prompt, messages, tools) for side, messages in given.items()}
        before = next(iter(both.values()))[0]
        if self.written == "together":
            if not all(text.startswith(before) for _, text in both.values()):
                raise ValueError(
                    "the chat template does not begin prompt and answer with the prompt, as axolotl assumes"
                )
            return self.texts(Texts(prompt=before, **{side: text[len(before) :] for side, (_, text) in both.items()}))
        if self.loss in _OLDER:
            for _, text in both.values():
                before = "".join(one for one, _ in takewhile(_same, zip(before, text, strict=False)))
            return self._older(before, {side: text[len(before) :] for side, (_, text) in both.items()})
        prompt = self._ids(before, special=False)
        whole = {side: self._ids(text, special=False) for side, (_, text) in both.items()}
        if self.written == "whole" and any(ids[: len(prompt)] != prompt for ids in whole.values()):
            raise ValueError(
                "the chat template does not begin prompt and answer with the tokens of the prompt, as axolotl assumes"
            )
        return self._rows(prompt, whole)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _rows(self, prompt: list[int], whole: Mapping[str, list[int]]) -> tuple[Row, Row]:
        """The rows of these tokens of prompt and answer together, of which the answer begins where they differ from
        `prompt`: for both answers at the same place, except with KTO."""
        common = {side: _common(prompt, ids) for side, ids in whole.items()}
        if self.loss != "kto":
            common = dict.fromkeys(common, min(common.values()))
        return _both({side: _row(ids, common[side]) for side, ids in whole.items()})

    def _older(self, prompt: str, answers: Mapping[str, str]) -> tuple[Row, Row]:
        """The rows as TRL's ORPOTrainer and CPOTrainer make them."""
        asked, rows, starts = self._ids(prompt, special=False), {}, []
        first, last = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        for side, answer in answers.items():
            ids = self._ids(prompt + answer, special=False)
            start = len(asked) - (ids[: len(asked)] != asked)
            starts.append(ids[:start])
            begin = [] if first is None or (ids[:1] == [first] and start) else [first]
            end = [] if last is None or (ids[-1:] == [last] and len(ids) > start) else [last]
            rows[side] = _row([*begin, *ids, *end], len(begin) + start)
        if len(starts) == 2 and sum(one != other for one, other in zip(*starts, strict=False)) > 1:
            raise ValueError("the tokens of the prompt differ before the chosen and the rejected answer")
        return _both(rows)


def _both(rows: Mapping[str, Row]) -> tuple[Row, Row]:
    return rows.get("chosen", ()), rows.get("rejected", ())


def _row(ids: Sequence[int], start: int) -> Row:
    """The tokens, scored from `start` on. Raises ValueError where none is."""
    if start >= len(ids):
        raise ValueError("behind the prompt there are no tokens of an answer")
    return tuple((token, place >= start) for place, token in enumerate(ids))


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of items at the beginning that are the same."""
    return sum(1 for _ in takewhile(_same, zip(one, other, strict=False)))


def _same(pair: tuple[Any, Any]) -> bool:
    return bool(pair[0] == pair[1])


def _apart(template: ChatTemplate, answer: Sequence[Message]) -> str:
    """The text of an answer as axolotl takes it out of a conversation with another question: from the first place on
    where its content stands. Raises ValueError where that is not the answer."""
    content = str(answer[0]["content"])
    before, text = template.answered([_QUESTION], answer)
    found = text.find(content)
    if found < 0 or (found < _common(before, text) and text.count(content) > 1):
        raise ValueError(f"axolotl finds {shown(content, 80)} in what the chat template writes before it, or nowhere")
    return text[found:].rstrip()

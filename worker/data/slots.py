"""Writes conversations under LLaMA-Factory's named templates, as the pieces of text that LLaMA-Factory tokenizes one by
one, each learned or not."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.importers.llama_factory_records import Conversation, Turn
from planner.importers.llama_factory_templates import BOS, EOS, SlotTemplate, parts
from planner.importers.llama_factory_tools import calls_text, tools_text

log = logging.getLogger(__name__)

Piece = tuple[str | int, bool]
"""(a text that is tokenized by itself, or a token id; whether it is learned)."""


class Slots:
    """One of LLaMA-Factory's named templates, with a tokenizer. If the template has `ends_once`, the end token is
    learned after each answer, in place of the first token of the next message; `worker.data.padding.Rows` does that.
    Raises UserError for a tokenizer without the template's tokens, and for `everything` (learn all tokens) with a
    template under which LLaMA-Factory cannot do so."""

    def __init__(
        self,
        template: SlotTemplate,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        everything: bool,
        values: Mapping[str, Any],
    ) -> None:
        """`everything`: all is learned. `values`: what templates are told beside messages; only `enable_thinking`
        counts here."""
        self._template, self.name, self._tokenizer = template, name, tokenizer
        self._everything, self._thinks = everything, values.get("enable_thinking", True)
        if everything and template.ends_once:
            raise UserError(
                f"The template {name} cannot learn prompts.",
                code="template-prompts",
                exit_code=Exit.USAGE,
                hint="leave train_on_prompt out; LLaMA-Factory refuses it, too",
            )
        if template.ends_once:
            log.warning(
                "data: under %s the end token is learned behind each answer, also where another turn follows, in place "
                "of that one's first token, as in LLaMA-Factory; previews show it behind the last one",
                name,
            )
        check_tokens(tokenizer, template.tokens, name)

    def pieces(self, conversation: Conversation) -> tuple[Piece, ...]:
        """The pieces, each a text to be tokenized alone and whether it is learned, in which the template writes
        `conversation`. Raises ValueError for a conversation at which LLaMA-Factory fails."""
        template, turns = self._template, conversation.turns
        if template.ends_once and not all(turn.content for turn in turns[1:-1:2]):
            raise ValueError(f"an answer that the conversation goes on from is empty, behind which {self.name} ends it")
        pieces: list[Piece] = []
        for place in range(0, len(turns), 2):
            asks, answers = turns[place], turns[place + 1]
            if template.reasons and self._thinks is False:
                answers = Turn(
                    role=answers.role, content=self._without_thoughts(answers.content), learned=answers.learned
                )
            learned = self._everything or answers.learned
            pieces += [(piece, self._everything) for piece in self._asked(conversation, asks, place)]
            if template.reasons and not any(mark.strip() in answers.content for mark in template.thought):
                pieces.append((template.empty_thought, learned and bool(self._everything or self._thinks)))
            pieces += [(piece, learned) for piece in self._written(answers, place + 1)]
        if template.ends_once and self._tokenizer.eos_token_id is not None:
            pieces.append((int(self._tokenizer.eos_token_id), True))
        return tuple(pieces)

    def answer(self, conversation: Conversation, answer: Turn) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """(the pieces of `conversation`, which ends with a message to be answered; those of `answer`, which are
        learned), as LLaMA-Factory writes preferences: earlier answers are without their thoughts."""
        template, turns = self._template, conversation.turns
        before: list[str | int] = []
        for place, turn in enumerate(turns):
            if not place % 2:
                before += self._asked(conversation, turn, place)
                continue
            content = self._without_thoughts(turn.content) if template.reasons else turn.content
            before += self._written(Turn(role=turn.role, content=content), place)
        behind: list[str | int] = []
        if template.reasons and self._thinks is False:
            answer = Turn(role=answer.role, content=self._without_thoughts(answer.content))
        if template.reasons and not any(mark.strip() in answer.content for mark in template.thought):
            (behind if self._thinks else before).append(template.empty_thought)
        behind += self._written(answer, len(turns))
        if template.ends_once and self._tokenizer.eos_token_id is not None:
            behind.append(int(self._tokenizer.eos_token_id))
        return tuple((piece, False) for piece in before), tuple((piece, True) for piece in behind)

    def _asked(self, conversation: Conversation, turn: Turn, place: int) -> Iterator[str | int]:
        template = self._template
        system, tools = conversation.system or template.default_system, conversation.tools
        if not place:
            yield from self._tokens(parts(template.prefix, ""))
        if place or not (system or tools):
            yield from self._written(turn, place)
            return
        system_text = system + (tools_text(template.tools, tools) if tools else "")
        if template.system_in_user:
            first = "".join(text for text, _ in parts(template.system, system_text))
            yield from self._written(Turn(role=turn.role, content=first + turn.content), place, alone=turn.content)
        else:
            yield from self._tokens(parts(template.system, system_text))
            yield from self._written(turn, place)

    def _written(self, turn: Turn, place: int, *, alone: str | None = None) -> Iterator[str | int]:
        """The pieces of a turn. `alone`: what the turn says without the system's text, which is put only before a
        user's turn."""
        template, content = self._template, turn.content
        if turn.role == "user":
            # The template's place for the number of the turn; it is filled also within what is said.
            more = {} if template.system_in_user else {"idx": str(place // 2)}
            yield from self._tokens(parts(template.user, content, **more))
        elif turn.role == "results":
            words = content if alone is None else alone
            yield from self._tokens(parts(template.results or template.user, words))
        elif turn.role == "calls":
            yield from self._tokens(parts(template.calls or template.assistant, self._called(content)))
        else:
            yield from self._tokens(parts(template.assistant, content))

    def _called(self, content: str) -> str:
        """The text of a turn's calls. What stands around the call marks, or thoughts before the calls, comes first."""
        template = self._template
        if template.system_in_user:
            return calls_text(template.tools, content)
        if (marked := _between(template.call_marks, content)) is not None:
            return content.replace(marked[0], "") + calls_text(template.tools, marked[1])
        if (marked := _between(template.thought, content)) is not None:
            return marked[0] + calls_text(template.tools, content.replace(marked[0], ""))
        return calls_text(template.tools, content)

    def _without_thoughts(self, content: str) -> str:
        return _pattern(self._template.thought).sub("", content).lstrip("\n")

    def _tokens(self, pieces: Iterator[tuple[str, bool]]) -> Iterator[str | int]:
        tokenizer = self._tokenizer
        for piece, is_token in pieces:
            if not is_token:
                yield piece
            elif piece in (BOS, EOS):
                token = tokenizer.bos_token_id if piece == BOS else tokenizer.eos_token_id
                if token is not None:
                    yield int(token)
            else:
                token = tokenizer.convert_tokens_to_ids(piece[8:-2])
                assert isinstance(token, int)  # it is there: see `check_tokens`
                yield token


def check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str], name: str) -> None:
    """Raise UserError where the tokenizer lacks one of `tokens`, the special tokens that LLaMA-Factory's template
    `name` writes."""
    vocabulary = tokenizer.get_vocab()
    if missing := [token for token in tokens if token not in vocabulary]:
        raise UserError(
            f"The tokenizer has no token {missing[0]}, which the template {name} writes.",
            code="token-not-there",
            exit_code=Exit.USAGE,
            numbers=(f"{', '.join(missing)} not among its {len(vocabulary)}",),
            hint=f"to add them, as LLaMA-Factory does, give add_special_tokens: {','.join(missing)}",
        )


def _pattern(marks: tuple[str, str]) -> re.Pattern[str]:
    return re.compile(f"{re.escape(marks[0])}(.*?){re.escape(marks[1])}", re.DOTALL)


def _between(marks: tuple[str, str], content: str) -> tuple[str, str] | None:
    """The first text between two marks, (with the marks, without them); None where there is none."""
    match = _pattern(marks).search(content)
    return (match[0], match[1]) if match is not None else None

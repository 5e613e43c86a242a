"""Finds turns (the messages of a conversation as rendered) and their end marks in a rendered text, and which of them
are learned, by axolotl's rules (its `chat_template` data, version 0.19).

A turn is the part of the rendered text that changes when its message, with no keys but role and content, is given
another content. Its end mark is the first one within three tokens after it."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from planner.data.entry import LearnedTurns
from planner.data.records import Message
from planner.errors import Exit, UserError
from planner.keys.source import shown

log = logging.getLogger(__name__)

Spans = tuple[tuple[int, int], ...]
SOMETHING = "\ue000"  # in Unicode's private use area: it neither begins nor ends like anything in the data
_THOUGHT = "\ue001"
_MARK = re.compile(r"<[^\s<>]+>")
_NEAR = 3  # tokens that a template may write between what is said and its end mark


def common(one: str, other: str) -> int:
    """The number of characters with which both texts begin alike."""
    if one.startswith(other) or other.startswith(one):
        return min(len(one), len(other))
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[: at + 1] != other[: at + 1])


def ends_of(render: Callable[..., str], tokens: Sequence[str], end: str | None = None) -> tuple[str, ...]:
    """Those of the special `tokens` with which a chat template ends an answer: the one after the last answer, and the
    one after an answer that another message follows. Where two special tokens stand there and the second is the
    tokenizer's end token `end`, that one is taken. `render`: renders messages with the template, taking its variables
    as keyword arguments."""
    special = re.compile(r"\s*(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")

    def token(text: str) -> str | None:
        match = special.match(text)
        if match is not None and end and text.startswith(end, match.end()):
            return end
        return match[1] or None if match is not None else None

    question = [{"role": "user", "content": SOMETHING}]
    exchange = [*question, {"role": "assistant", "content": SOMETHING}]
    last = token(render(exchange).split(SOMETHING)[2])
    first, _, between, _ = render([*exchange, *question]).split(SOMETHING)
    past = token(between)
    # Without an end mark the next turn's beginning stands there. It changes with the role, or is how answers begin.
    asking = render(question, add_generation_prompt=True)
    begins = token(asking[common(asking, render(question)) :])
    is_end = past == token(render(exchange, add_generation_prompt=True).split(SOMETHING)[2]) != begins
    is_end |= past == token(between[: len(between) - common(first[::-1], between[::-1])])  # before that beginning
    return tuple(dict.fromkeys(mark for mark in (last, past if is_end else None) if mark is not None))


def stops_of(render: Callable[..., str], tokens: Sequence[str]) -> tuple[str, ...]:
    """The special `tokens` at which generation may stop: those that end an answer (`ends_of`) and that the template
    does not also write within one. For example, gpt-oss ends past answers with the token that also ends an answer's
    thoughts; a model that stopped at it would never answer. `render`: renders messages with the template."""
    thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _THOUGHT)
    question = [{"role": "user", "content": SOMETHING}]
    shown = render([*question, {"role": "assistant", "content": SOMETHING, **thought}])
    within = shown.partition(_THOUGHT)[2].partition(SOMETHING)[0]
    return tuple(end for end in ends_of(render, tokens) if end not in within)


def split_end(render: Callable[..., str], tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning, as text, for a chat template that ends answers with a mark like `<…>` that this tokenizer splits into
    several tokens. None for other templates, also for those whose answers end without a mark. `render`: renders
    messages with the template."""
    question = [{"role": "user", "content": SOMETHING}]
    text, _, behind = render([*question, {"role": "assistant", "content": SOMETHING}]).rpartition(SOMETHING)
    end = _MARK.match(behind.lstrip())
    marks = _MARK.findall(text + render(question, add_generation_prompt=True) + behind)
    sizes = {mark: len(tokenizer(mark, add_special_tokens=False)["input_ids"]) for mark in marks}
    if not text or end is None or sizes[end[0]] == 1:
        return None
    split = [mark for mark, size in sizes.items() if size > 1]
    others = ", ".join(mark for mark in split if mark != end[0])
    eos = tokenizer.eos_token
    return (
        f"the chat template ends answers with {end[0]}, which is no token of this tokenizer but split into "
        f"{sizes[end[0]]}{f', as are {others}' if others else ''}"
        f"{f'; its own end token, {eos}, is not written' if eos and eos not in behind else ''}: "
        "give the chat_template that belongs to this tokenizer (null: the one that it has), or add_tokens: "
        f"{shown(split)} and special_tokens: {{eos_token: {shown(end[0])}}}"
    )


def unasked(render: Callable[..., str]) -> str | None:
    """A warning, as text, for a chat template that writes words of its own before answers but does not write them when
    rendered with `add_generation_prompt`; None for others. `render`: renders messages with the template."""
    question = [{"role": "user", "content": SOMETHING}]
    text = render(question)
    if render(question, add_generation_prompt=True) != text:
        return None
    _, between, _ = render([*question, {"role": "assistant", "content": SOMETHING}]).split(SOMETHING)
    begins = between.removeprefix(text.split(SOMETHING)[-1])
    if not begins.strip():
        return None
    return (
        f"the chat template has no generation prompt: in training answers stand behind {shown(begins)}, and where one "
        "is asked for, as in samples, by offmate sample or generate, this is not written: give a chat_template that "
        "ends with it where add_generation_prompt is set"
    )


def unlearned_end(render: Callable[..., tuple[str, Spans]], ends: Sequence[str]) -> str | None:
    """A warning, as text, for a chat template whose `{% generation %}` part leaves out the special token, one of
    `ends`, that it writes after an answer; None for others. `render`: renders messages and returns the text with the
    spans of characters that are in such a part."""
    text, spans = render([{"role": "user", "content": SOMETHING}, {"role": "assistant", "content": SOMETHING}])
    behind = text.rindex(SOMETHING) + 1
    end = re.compile(rf"\s*({'|'.join(map(re.escape, ends))})").match(text, behind) if ends else None
    if end is None or any(start <= end.start(1) and to >= end.end(1) for start, to in spans):
        return None
    return (
        f"the chat template's {{% generation %}} leaves out {end[1]}, which ends answers: it is not learned, and the "
        f"model does not learn to stop: give a chat_template that has {{% endgeneration %}} behind it"
    )


class Turns:
    """Finds which characters of a rendered conversation are learned, by the choice of messages and end marks in
    `learned`. `ends`: the tokens with which the template ends an answer (`ends_of`), used as end marks where the job
    gives no `eot_tokens`. Raises UserError "mark-of-several-tokens" for a mark that is not one token of this tokenizer,
    and "marks-disagree"."""

    def __init__(
        self, learned: LearnedTurns, template: str, tokenizer: PreTrainedTokenizerBase, ends: Sequence[str]
    ) -> None:
        self._learned, self._tokenizer = learned, tokenizer
        end: str | None = tokenizer.eos_token
        ended = end is not None and (end in template or "eos_token" in template)
        present = tuple(mark for mark in learned.marks if mark in template or (ended and mark == end))
        self._lost = [mark for mark in learned.marks if mark not in present]
        self._none = not (present if learned.marks else ended or ends)
        self._more = [] if learned.marks else [mark for mark in ends if mark != end]
        marks = present if learned.marks else tuple(dict.fromkeys((*([end] if end else ()), *ends)))
        ids = {mark: tokenizer(mark, add_special_tokens=False)["input_ids"] for mark in marks}
        if present not in ((), (end,)) and (several := [mark for mark in marks if len(ids[mark]) != 1]):
            raise UserError(
                f"{several[0]} of eot_tokens is {len(ids[several[0]])} tokens.",
                code="mark-of-several-tokens",
                exit_code=Exit.USAGE,
                hint=f"make it one: add_tokens: [{shown(several[0])}]",
            )
        if len(present) > 1 and end in present and learned.eos != learned.eot:
            raise UserError(
                f"{end} is the tokenizer's end token, and one of eot_tokens.",
                code="marks-disagree",
                exit_code=Exit.USAGE,
                numbers=(f"train_on_eos is {learned.eos}, train_on_eot {learned.eot}",),
                hint=f"make them the same, or take {end} out of eot_tokens",
            )
        single = {pieces[0] for pieces in ids.values() if len(pieces) == 1}
        self._marks = ((single, learned.eot), ({tokenizer.eos_token_id} - {None}, learned.eos))

    def check_marks(self) -> None:
        """Raise UserError "no-end-mark" where end marks are to be learned but the template writes no known one. Log a
        warning where it lacks some, or where marks are learned that axolotl would not learn."""
        lost = ", ".join(self._lost)
        words = {self._learned.eot} if lost else {self._learned.eot, self._learned.eos}
        if self._none and words != {"none"}:
            raise UserError(
                f"The chat template does not write {lost} of eot_tokens."
                if lost
                else "The chat template writes no end mark that is known.",
                code="no-end-mark",
                exit_code=Exit.USAGE,
                numbers=(f"the tokenizer's end token is {self._tokenizer.eos_token}",),
                hint="name the tokens that end a turn there: eot_tokens: [...]; train_on_eos: none learns none",
            )
        if lost:
            log.warning("data: the chat template does not write %s of eot_tokens", lost)
        if self._more and words != {"none"}:
            log.warning(
                "data: the chat template ends answers with %s, which is learned as an end mark; axolotl learns it "
                "where the file has eot_tokens: %s",
                ", ".join(self._more),
                shown(self._more),
            )

    def spans(self, text: str, messages: Sequence[Message], places: Callable[[int], Spans]) -> Spans:
        """The spans of characters of `text`, the rendered `messages`, that are learned. `places`: gives, by the number
        of a message, the spans of its words in the text; none where it is not shown. Raises UserError "turn-not-shown"
        where a message that is to be learned is not shown."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, tokens = encoded["input_ids"], encoded["offset_mapping"]
        starts = [start for start, _ in tokens]
        roles, everywhere = self._learned.roles, any(which == "all" for _, which in self._marks)
        spans: set[tuple[int, int]] = set()
        last: dict[int, int] = {}
        for index, message in enumerate(messages):
            wanted = message.get("train", roles is None or message["role"] in roles)
            if not wanted and not everywhere:
                continue
            if not (pieces := places(index)):
                if wanted and message["content"].strip():
                    raise _not_shown(message)
                continue
            if wanted:
                spans |= {*pieces}
            behind = bisect_left(starts, pieces[-1][1])
            for kind, (marks, which) in enumerate(self._marks):
                near = range(behind, min(behind + _NEAR + 1, len(ids)))
                if (at := next((at for at in near if ids[at] in marks), None)) is not None:
                    last[kind] = at
                    if which == "all" or (which == "turn" and wanted):
                        spans.add(tuple(tokens[at]))
        spans |= {tuple(tokens[at]) for kind, at in last.items() if self._marks[kind][1] == "last"}
        return tuple(sorted(spans))


def _not_shown(message: Message) -> UserError:
    return UserError(
        f"A turn of the role {message['role']} is to be learned, and the chat template does not show what it says.",
        code="turn-not-shown",
        exit_code=Exit.USAGE,
        numbers=(f"turn: {shown(message['content'], 200)}",),
        hint="give a chat_template that shows it, or leave its role out of roles_to_train",
    )

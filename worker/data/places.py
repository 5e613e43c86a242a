"""Finds where each message stands in a conversation's rendered text, and proves it by rendering the messages with other
words.

The conversation is rendered with marks, single characters, in place of the messages' words (`shapes.py`). Where
replacing the marks by the words gives the conversation's text, the place of all words is known, and what the template
writes between them. Else each message is examined alone: its place is what changes in the text when the message has
other words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import dropwhile
from typing import Any

from jinja2 import TemplateError

from planner.data.records import Message
from planner.errors import Exit, UserError
from planner.keys.source import shown
from worker.data.chat_turns import Spans, common
from worker.data.shapes import THOUGHTS, Filled, Render, Shape, Shapes, fill, private_character

REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    NameError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    AssertionError,
)
"""The errors that rendering may raise for a conversation that the template does not accept. A template is compiled to
Python, which has limits of its own: 21 nested loops are a SyntaxError."""


class Conversation:
    """The rendered text of a conversation, and which of its characters belong to each message. Messages are counted
    from 0."""

    def __init__(
        self,
        render: Render,
        shapes: Shapes,
        messages: Sequence[Message],
        tools: list[Any] | None,
        text: str,
        *,
        values: str,
        marks: Sequence[str],
        ends: Sequence[str],
    ) -> None:
        """`render`: makes `text` from messages and tools. `values`: what else it tells the template, as a text.
        `marks`: the tokenizer's special tokens, the longest first. `ends`: those of them that end an answer."""
        self._render, self._shapes, self._values = render, shapes, values
        self._messages, self._tools, self._text = messages, tools, text
        self._marks, self._ends = marks, tuple(ends)
        self._marked, self._said = shapes.marked(messages)
        self._more_changes: set[int] = set()  # messages whose words also change other text, such as a count
        self._shape = self._shape_of(len(messages))

    @property
    def roles(self) -> str:
        """The roles of all messages, as one text for error messages."""
        return f"roles: {', '.join(message['role'] for message in self._messages)}"

    def shows(self, key: str) -> bool:
        """Whether the rendered text is known to contain the words that some message has under the key `key`, such as
        `content`."""
        return any(said.key == key for mark, said in self._said.items() if mark in self._shown)

    def unshown(self) -> int | None:
        """The number of the first message, assistant messages before others, whose content can be replaced without
        changing the rendered text; None where there is none."""
        if self._said.keys() <= self._shown:
            return None
        seen = {said.message for mark, said in self._said.items() if said.key == "content" and mark in self._shown}
        others = {said.message for said in self._said.values() if said.key == "content"} - seen
        for index in sorted(others, key=lambda index: (self._messages[index]["role"] != "assistant", index)):
            with contextlib.suppress(*REFUSALS):
                if self._with(index, self._messages[index] | {"content": self._other}) == self._text:
                    return index
        return None

    def turn(self, index: int) -> Spans:
        """The spans of characters that the assistant writes for message number `index`: from the end of the generation
        prompt to where the template begins the next message, without text in which the template depends on the
        message's words. Where these borders cannot be found, the spans of the message's words and of the end mark after
        them. Raises UserError where the text does not show the message, or where it cannot be separated from others'
        words."""
        calls = bool(self._messages[index].get("tool_calls"))
        (start, prompted), (end, complete) = self._until(index, add_generation_prompt=True), self._until(index + 1)
        words = self._own(index)
        first, last = words or (len(self._text), 0)
        if words is not None and not calls:
            pieces: Spans = (words,)
        elif (
            prompted
            and (complete or not calls)
            and start < end
            and start <= first
            and last <= end
            and self._is_apart(index, start, end)
        ):
            pieces = ((start, end),)
        else:
            pieces = self.said(index) if calls else self._place_of_nothing(index)
        if not pieces:
            raise self._not_found(index)
        first, last = pieces[0][0], pieces[-1][1]
        if not prompted or start > first or not self._is_apart(index, start, first):
            start = self._whole(index, pieces)[0]
        if end < last or not self._is_apart(index, last, end):
            end = self._whole(index, pieces)[1]
        # End marks within the answer do not count.
        words_end = max((to for _, to in self._places[index]), default=start)
        end = self._trimmed(words_end, self._past_mark(index, words_end, end))
        end = end if calls else self._up_to_mark(words_end, end)
        if len(pieces) == 1:
            if end <= start and not self._messages[index]["content"].strip():  # an empty answer without an end mark
                return ()
            if end <= start or not self._is_shown(index, start, end):
                raise self._not_found(index)
            return ((start, end),)
        return ((start, pieces[0][1]), *pieces[1:-1], (pieces[-1][0], end))

    def said(self, index: int) -> Spans:
        """The spans of characters that message number `index` has in the text: its words and its tool calls. Empty
        where the text does not show the message. Raises UserError "turns-not-apart" where others' words cannot be
        separated from it: a template may write the results of tool calls within the message that called, before the
        rest of its words."""
        words = self._own(index)
        if self._messages[index].keys() <= {"role", "content"} and (words is None or self._is_whole(index)):
            return () if words is None else (words,)
        pieces = self._changed(index)
        if not all(self._is_apart(index, *piece) for piece in pieces):
            raise self._not_apart(index)
        return pieces

    def going_on(self, index: int) -> int:
        """The place in the text, in characters, where message number `index` and all later ones begin. As in TRL, it is
        where the text departs from the rendering of the earlier messages with the generation prompt. Raises UserError
        "turns-not-apart" where the words of earlier and later messages cannot be separated."""
        before = max((end for spans in self._places[:index] for _, end in spans), default=0)
        first, last = min((place for spans in self._places[index:] for place in spans), default=(len(self._text),) * 2)
        start = -1
        if (beginning := self._beginning(index, add_generation_prompt=True)) is not None:
            at, here, earlier = beginning
            start = at + common(here, earlier)
            if here == earlier[: len(here)]:  # the generation prompt may begin the answer, as with <think>
                start += common(self._text[start:last], earlier[len(here) :])
            start = self._before_mark(start)
        if not before <= start <= last:
            pieces = self.said(index)
            start = self._whole(index, pieces)[0] if pieces else first
        if not before <= start <= last:
            raise self._not_apart(index)
        return start

    def check_marked(self, spans: Spans) -> None:
        """Raise UserError where `spans`, the parts of the text that the template marks as the assistant's with `{%
        generation %}`, contain others' words, or move against the words when these change, as happens where the
        template marks within a macro."""
        for index, message in enumerate(self._messages if spans else ()):
            if message["role"] != "assistant":
                for at, to in self._places[index]:
                    if any(start < to and end > at for start, end in spans):
                        raise self._marks_of_others(index)
        if self._filled is not None and not self._filled.is_marked_alike(spans):
            raise UserError(
                "The chat template's {% generation %} does not hold what is said between its two marks.",
                code="turns-not-marked",
                exit_code=Exit.USAGE,
                numbers=(self.roles,),
                hint="a chat_template may not have {% generation %} within a macro, or within {% set %}",
            )

    def is_within(self, index: int, span: tuple[int, int]) -> bool:
        """Whether the characters of `span`, (begin, end), contain part of the words of message number `index`; True
        also where the places of its words are not known."""
        places = self._places[index]
        return not places or any(start < span[1] and end > span[0] for start, end in places)

    @property
    def _shown(self) -> frozenset[str]:
        """The marks that the shape of the whole conversation shows; empty where there is no shape."""
        return self._shape.shown if self._shape is not None else frozenset()

    @cached_property
    def _filled(self) -> Filled | None:
        """The shape of the whole conversation, filled with its words; None where that is not the text."""
        return fill(self._shape, self._said, self._text) if self._shape is not None else None

    @cached_property
    def _places(self) -> list[Spans]:
        """The places of each message's words, in the order of the text. Calls are not included."""
        if self._filled is None:
            return [self._place_by_itself(index) for index in range(len(self._messages))]
        places: list[Spans] = [()] * len(self._messages)
        for mark, place in zip(self._filled.shape.marks, self._filled.places, strict=True):
            places[self._said[mark].message] += (place,)
        return places

    def _place_by_itself(self, index: int) -> Spans:
        """Where a message's words stand, found by replacing the words of this message alone. The whole text where the
        template refuses other words."""
        message = self._messages[index]
        if not any(said.message == index for said in self._said.values()):
            return ()
        with contextlib.suppress(*REFUSALS):
            marked, said = self._shapes.marked(self._messages, index)
            if (filled := fill(Shape.of(*self._render(marked, self._tools)), said, self._text)) is not None:
                return filled.places
        bare = {"role": message["role"], "content": self._other}
        for other in ([bare] if message["role"] == "assistant" else []) + [message | {"content": self._other}]:
            with contextlib.suppress(*REFUSALS):
                start, end = self._changing(index, other)
                self._more_changes |= {index} if self._changes_more(index) else set()
                return ((start, end),) if end > start else ()
        return ((0, len(self._text)),)

    def _changes_more(self, index: int) -> bool:
        """Whether a message's words also change other text than the words themselves, each shown once."""
        message = self._messages[index]
        words = [key for key in ("content", *THOUGHTS) if isinstance(text := message.get(key), str) and text.strip()]
        with contextlib.suppress(*REFUSALS):
            shown = self._with(index, message | dict.fromkeys(words, self._other))
            start, end = _changing(self._text, shown)
            instead = shown[start : len(shown) + end - len(self._text)]
            ends = instead.startswith(self._other) and instead.endswith(self._other)
            return not message.get("tool_calls") and not (ends and instead.count(self._other) <= len(words))
        return False

    def _own(self, index: int) -> tuple[int, int] | None:
        """The span of a message's words, with the template's words between them; None where it has no words. Raises
        UserError "turns-not-apart" where they are shown twice, have others' words between them, or also change other
        text."""
        if not (places := self._places[index]):
            return None
        span = (places[0][0], places[-1][1])
        many = sum(said.message == index for mark, said in self._said.items() if mark in self._shown)
        if self._filled is not None and len(places) > many:
            raise self._not_apart(index)
        if index in self._more_changes or not self._is_apart(index, *span):
            raise self._not_apart(index)
        return span

    def _is_whole(self, index: int) -> bool:
        """Whether the message's content is all that it says, and one mark stands for it."""
        words = [said.text for said in self._said.values() if said.message == index]
        return words == [self._messages[index]["content"]]

    def _whole(self, index: int, pieces: Spans) -> tuple[int, int]:
        """The span from the first to the last of a message's pieces. A single piece is extended to the whole content,
        if that stands around it: the places of tags in the content are not known."""
        content, (first, last) = self._messages[index]["content"].strip(), (pieces[0][0], pieces[-1][1])
        start = self._text.find(content, max(0, last - len(content)), first + len(content))
        whole = (min(first, start), max(last, start + len(content)))
        return whole if start >= 0 and len(pieces) == 1 and self._is_apart(index, *whole) else (first, last)

    def _is_shown(self, index: int, start: int, end: int) -> bool:
        """Whether a message's content is shown: all its marks in the shape, or, without one, in this piece of the
        text."""
        if self._filled is None:
            return self._messages[index]["content"].strip() in self._text[start:end]
        return {m for m, said in self._said.items() if (said.message, said.key) == (index, "content")} <= self._shown

    def _is_apart(self, index: int, start: int, end: int) -> bool:
        """Whether no words of messages other than `index` stand between `start` and `end`."""
        others = (place for other, spans in enumerate(self._places) if other != index for place in spans)
        return not any(at < end and to > start for at, to in others)

    def _shape_of(self, many: int, **flags: bool) -> Shape | None:
        """The shape of the first `many` messages; None where the template refuses them."""
        with contextlib.suppress(*REFUSALS):
            return self._shapes.render(self._render, self._marked[:many], self._tools, self._values, **flags)
        return None

    def _beginning(self, many: int, **flags: bool) -> tuple[int, str, str] | None:
        """`Filled.goes_on` for the first `many` messages. Where the shape does not give the text, the comparison begins
        at the first character. None also where the template refuses these messages."""
        if self._filled is not None:
            shape = self._shape_of(many, **flags)
            return self._filled.goes_on(shape) if shape is not None else None
        with contextlib.suppress(*REFUSALS):
            return 0, self._text, self._render(self._messages[:many], self._tools, **flags)[0]
        return None

    def _until(self, many: int, **flags: bool) -> tuple[int, bool]:
        """(up to where the text agrees with the rendering of the first `many` messages, whether it agrees with all of
        that rendering); (-1, False) where this cannot be determined."""
        if many == len(self._messages) and not flags:
            return len(self._text), True
        if (beginning := self._beginning(many, **flags)) is None:
            return -1, False
        at, here, earlier = beginning
        if here.startswith(earlier):
            return at + len(earlier), True
        return self._before_mark(at + common(here, earlier)), False

    def _place_of_nothing(self, index: int) -> Spans:
        """The empty span where an answer without words would have its words; none where it cannot be determined."""
        with contextlib.suppress(*REFUSALS):
            before, *behind = self._with(index, self._messages[index] | {"content": self._other}).split(self._other)
            if [before, *behind] == [before, self._text[len(before) :]]:
                return ((len(before), len(before)),)
        return ()

    def _changed(self, index: int) -> Spans:
        """The spans of the text that change with what a message says or calls; none where nothing changes. Raises
        UserError "turns-not-apart"."""
        message = self._messages[index]
        bare, other = {"role": message["role"], "content": self._other}, {**message, "content": self._other}
        silent = {**message, "content": ""}
        with contextlib.suppress(*REFUSALS):
            start, end = self._changing(index, bare)
            if end <= start:
                return ()
            if self._is_apart(index, start, end):
                return ((start, end),)
        if as_last := self._as_last(index, message):
            return (as_last,)
        if message.get("tool_calls") and (calls := self._as_last(index, silent)):
            with contextlib.suppress(*REFUSALS):
                change = self._changing(index, other)
                if calls[1] <= change[0]:
                    return calls, change
        raise self._not_apart(index)

    def _as_last(self, index: int, message: Message) -> tuple[int, int] | None:
        """The span that changes with `message` at the place `index` when nothing follows it, if the text begins in the
        same way. Else, the same without only the results of its calls, which some templates refuse without the calls.
        None where neither is found."""
        bare = {"role": message["role"], "content": self._other}
        for behind in ([], [*dropwhile(lambda other: other["role"] == "tool", self._messages[index + 1 :])]):
            with contextlib.suppress(*REFUSALS):
                shown, other = (
                    self._render([*self._messages[:index], this, *behind], self._tools)[0] for this in (message, bare)
                )
                start, end = _changing(shown, other)
                if end > start and self._text.startswith(shown[:end]):
                    return start, end
        return None

    def _changing(self, index: int, other: Message) -> tuple[int, int]:
        """The span of the text that changes when another message takes the place of this one."""
        return _changing(self._text, self._with(index, other))

    def _with(self, index: int, other: Message) -> str:
        """The text with another message in place of this one."""
        return self._render([*self._messages[:index], other, *self._messages[index + 1 :]], self._tools)[0]

    @cached_property
    def _other(self) -> str:
        return private_character(self._text)

    def _past_mark(self, index: int, words_end: int, end: int) -> int:
        """`end`, or the end of the end mark that begins there, if no end mark stands between `words_end` and `end`."""
        if self._ends and not self._text[words_end:end].rstrip().endswith(self._ends):
            mark = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._ends))})").match(self._text, end)
            if mark is not None and self._is_apart(index, end, mark.end()):
                return mark.end()
        return end

    def _up_to_mark(self, words_end: int, end: int) -> int:
        """`end`, or the end of the first end mark behind `words_end`, if the template's own words follow it before
        `end`: tools, or a closing line behind the last turn."""
        for mark in re.finditer("|".join(map(re.escape, self._ends)), self._text[words_end:end]) if self._ends else ():
            tail = self._text[words_end + mark.end() : end]
            for special in (*self._marks, *self._ends):
                tail = tail.replace(special, "")
            return words_end + mark.end() if tail.strip() else end
        return end

    def _before_mark(self, end: int) -> int:
        """`end`, or the start of the special token that it lies within: two special tokens may begin alike."""
        for mark in self._marks:
            start = self._text.rfind(mark, max(0, end - len(mark) + 1), end + len(mark) - 1)
            if start >= 0 and start < end < start + len(mark):
                return start
        return end

    def _trimmed(self, start: int, end: int) -> int:
        """`end`, or the end of a special token that only white space separates from it: the newline after an end mark
        is the template's."""
        written = self._text[start:end].rstrip()
        return start + len(written) if any(written.endswith(mark) for mark in self._marks) else end

    def _not_found(self, index: int) -> UserError:
        return UserError(
            "The chat template does not show what the assistant says as it is in the data.",
            code="assistant-turn-not-found",
            exit_code=Exit.USAGE,
            numbers=(f"turn: {shown(self._messages[index]['content'].strip(), 200)}",),
            hint="use train_on: all, or a chat_template with {% generation %} around the assistant's turns",
        )

    def _not_apart(self, index: int) -> UserError:
        return UserError(
            f"The chat template does not show turn {index + 1} of a conversation apart from what others say.",
            code="turns-not-apart",
            exit_code=Exit.USAGE,
            numbers=(self.roles,),
            hint="give a chat_template that shows one turn after another",
        )

    def _marks_of_others(self, index: int) -> UserError:
        role = self._messages[index]["role"]
        return UserError(
            f"The chat template's {{% generation %}} holds what the {role} says in turn {index + 1}.",
            code="turns-not-apart",
            exit_code=Exit.USAGE,
            numbers=(self.roles,),
            hint="give a chat_template with {% generation %} around the assistant's turns alone, and in no macro",
        )


def _changing(text: str, other: str) -> tuple[int, int]:
    start = common(text, other)
    return start, len(text) - common(text[start:][::-1], other[start:][::-1])

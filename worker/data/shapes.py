"""Finds what a chat template writes around the messages' words, by rendering conversations with marks (single
private-use characters) in place of the words."""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from planner.data.records import Message
from worker.data.chat_turns import Spans

Render = Callable[..., tuple[str, Spans]]
"""A function `render(messages, tools, **flags)` that returns a conversation's text, and the spans of characters in it
that the template marks as the assistant's."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The keys under which a message has text beside its content: the model's thoughts."""
_WORDS = ("content", *THOUGHTS)
_FIRST_MARK = 0xF0000
_MARKS = re.compile("([\U000f0000-\U0010ffff])")  # Unicode's planes for private use
_NAMED = re.compile(r"</?\w+>")
_MOST_KNOWN = 1024


class Said(NamedTuple):
    """The words that a mark, a character put in their place before rendering, stands for; with the number of their
    message (from 0) and the key under which the message has them."""

    message: int
    key: str
    text: str


@dataclass(frozen=True)
class Shape:
    """A conversation rendered with marks (single private-use characters) in place of the messages' words. `marks`: in
    the order in which the text has them. `gaps`: the template's own texts before, between and after the marks, one more
    than there are marks. `spans`: the characters of this text that the template marks as the assistant's."""

    gaps: tuple[str, ...]
    marks: tuple[str, ...] = ()
    spans: Spans = ()

    @classmethod
    def of(cls, text: str, spans: Spans = ()) -> Shape:
        """Take a text rendered with marks apart, into the marks and the template's own texts between them. `spans`: the
        characters that the template marks as the assistant's."""
        pieces = _MARKS.split(text)
        return cls(tuple(pieces[::2]), tuple(pieces[1::2]), spans)

    @cached_property
    def shown(self) -> frozenset[str]:
        """The set of marks (characters that stand for words) that occur in the rendered text."""
        return frozenset(self.marks)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The begin and the end of each of `spans`, in order, each as (number of the gap that it is in, number of
        characters from the gap's start)."""
        begins = [0, *accumulate(len(gap) + 1 for gap in self.gaps)]
        gaps = [(bisect_right(begins, edge) - 1, edge) for span in self.spans for edge in span]
        return [(gap, edge - begins[gap]) for gap, edge in gaps]


class Shapes:
    """Renders conversations with marks (single private-use characters) in place of the messages' words. Conversations
    that differ only in their words have the same result, which is rendered once and then kept."""

    def __init__(self, template: str) -> None:
        """`template`: the text of the chat template. Tags that it names, such as `</think>`, do not count as words,
        because the template may look for them in what is said: a tag stays, and the words around it become marks."""
        tags = sorted(set(_NAMED.findall(template)))
        self._tags = re.compile(f"({'|'.join(tags)})") if tags else None
        self._dated = "strftime_now" in template
        self._known: dict[str, Shape] = {}

    def marked(self, messages: Sequence[Message], only: int | None = None) -> tuple[list[Message], dict[str, Said]]:
        """Put marks (single private-use characters) in place of the messages' words. Returns the changed copies of the
        messages, and what each mark stands for. `only`: change only the message of this number. The first messages of a
        conversation get the same marks alone as within the whole conversation."""
        said: dict[str, Said] = {}
        marked = []
        for index, message in enumerate(messages):
            if only is None or only == index:
                message = {**message}
                for key in _WORDS:
                    if isinstance(words := message.get(key), str):
                        message[key] = self._marks(index, key, words, said)
            marked.append(message)
        return marked, said

    def _marks(self, index: int, key: str, text: str, said: dict[str, Said]) -> str:
        pieces = self._tags.split(text) if self._tags is not None and "<" in text else [text]
        for place in range(0, len(pieces), 2):
            if pieces[place].strip():
                mark = chr(_FIRST_MARK + len(said))
                said[mark] = Said(index, key, pieces[place])
                pieces[place] = mark
        return "".join(pieces)

    def render(
        self, render: Render, marked: Sequence[Message], tools: list[Any] | None, values: str, **flags: bool
    ) -> Shape:
        """Render messages that `marked` has given with `render`, and take the text apart into marks and the template's
        own text. `values`: the template's other variables as one text, to tell renderings apart."""
        name = repr((marked, tools, values, flags, date.today() if self._dated else None))
        if (known := self._known.get(name)) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[name] = Shape.of(*render(marked, tools, **flags))
        return known


@dataclass(frozen=True, slots=True)
class Filled:
    """A conversation's `text`, whose parts are known because its rendering with marks, `shape`, becomes this text when
    each mark is replaced by the words that it stands for. `starts`: where in the text each gap, a text between two
    marks, begins. `places`: the begin and the end, in the text, of the words of each mark, in the order of the
    marks."""

    text: str
    shape: Shape
    starts: tuple[int, ...] = (0,)
    places: Spans = ()

    def goes_on(self, shorter: Shape) -> tuple[int, str, str] | None:
        """Compare what the template writes after the words of a `shorter` conversation, the first messages of this one.
        Returns (where in this text its last words end, what stands here between them and the next words, what stands
        after them in `shorter`). None where its last words occur twice or not at all here."""
        gap = 0
        if shorter.marks:
            if self.shape.marks.count(shorter.marks[-1]) != 1:
                return None
            gap = self.shape.marks.index(shorter.marks[-1]) + 1
        return self.starts[gap], self.shape.gaps[gap], shorter.gaps[-1]

    def is_marked_alike(self, spans: Spans) -> bool:
        """Whether `spans`, the parts of the text that the template marks as the assistant's, agree with those of the
        rendering with marks. Each edge must be at the same place between the same words, or within the words next to
        which it is there."""
        if len(spans) != len(self.shape.spans):
            return True  # the number of spans may depend on what is said
        for edge, (gap, behind) in zip((edge for span in spans for edge in span), self.shape.edges, strict=True):
            least = most = self.starts[gap] + behind
            if behind == 0 and gap > 0:
                least = self.places[gap - 1][0]
            if behind == len(self.shape.gaps[gap]) and gap < len(self.places):
                most = self.places[gap][1]
            if not least <= edge <= most:
                return False
        return True


def fill(shape: Shape, said: dict[str, Said], text: str) -> Filled | None:
    """Put the words of a conversation into the rendering of its shape, in which marks stand for them (`said`: mark ->
    words). The words are tried as they are, and in the forms in which templates write them (such as stripped). None
    where no form gives `text`, the conversation's own rendering: then the template does more than insert words."""
    if not text.startswith(shape.gaps[0]):
        return None
    at, starts, places = len(shape.gaps[0]), [0], []
    for number, (mark, gap) in enumerate(zip(shape.marks, shape.gaps[1:], strict=True), start=1):
        last = number == len(shape.marks)
        for words in written(said[mark].text) if mark in said else ():
            end = at + len(words)
            if text.startswith(words, at) and text.startswith(gap, end) and (not last or end + len(gap) == len(text)):
                break
        else:
            return None
        places.append((at, end))
        starts.append(end)
        at = end + len(gap)
    return Filled(text, shape, tuple(starts), tuple(places)) if at == len(text) else None


def written(words: str) -> Iterator[str]:
    """Yield the forms in which chat templates write a message's words: unchanged, stripped of white space, or escaped
    as in JSON."""
    yield words
    yield from {words.rstrip(): 0, words.lstrip(): 0, words.strip(): 0}
    yield json.dumps(words, ensure_ascii=False)[1:-1]


def private_character(text: str) -> str:
    """The first character of Unicode's private use area that does not occur in `text`."""
    return next(mark for mark in map(chr, range(_FIRST_MARK, sys.maxunicode + 1)) if mark not in text)

"""Finds what a chat template writes around what is said, by rendering conversations with marks in place of words."""

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
"""`render(messages, tools, **flags)` gives a conversation's text and the spans that the template marks in it."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message whose text is said beside its content."""
_WORDS = ("content", *THOUGHTS)
_FIRST_MARK = 0xF0000
_MARKS = re.compile("([\U000f0000-\U0010ffff])")  # Unicode's planes for private use
_NAMED = re.compile(r"</?\w+>")
_MOST_KNOWN = 1024


class Said(NamedTuple):
    """The text that a mark stands for, with the message (counted from 0) and the key under which it is said."""

    message: int
    key: str
    text: str


@dataclass(frozen=True)
class Shape:
    """A rendering with marks. `marks`: in the order in which they are shown. `gaps`: the texts before, between and
    after the marks, one more than there are marks. `spans`: what the template marks as the assistant's, in characters
    of the rendering."""

    gaps: tuple[str, ...]
    marks: tuple[str, ...] = ()
    spans: Spans = ()

    @classmethod
    def of(cls, text: str, spans: Spans = ()) -> Shape:
        """The shape of a rendering."""
        pieces = _MARKS.split(text)
        return cls(tuple(pieces[::2]), tuple(pieces[1::2]), spans)

    @cached_property
    def shown(self) -> frozenset[str]:
        """The set of marks that are shown."""
        return frozenset(self.marks)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The beginning and the end of each span, one after another, as (number of the gap, characters from its
        start)."""
        begins = [0, *accumulate(len(gap) + 1 for gap in self.gaps)]
        gaps = [(bisect_right(begins, edge) - 1, edge) for span in self.spans for edge in span]
        return [(gap, edge - begins[gap]) for gap, edge in gaps]


class Shapes:
    """Renders the shapes of conversations. A shape that many conversations share is rendered once."""

    def __init__(self, template: str) -> None:
        """`template`: the text of the chat template. Tags that it names, such as `</think>`, do not count as words,
        because the template may look for them in what is said: a tag stays, and the words around it become marks."""
        tags = sorted(set(_NAMED.findall(template)))
        self._tags = re.compile(f"({'|'.join(tags)})") if tags else None
        self._dated = "strftime_now" in template
        self._known: dict[str, Shape] = {}

    def marked(self, messages: Sequence[Message], only: int | None = None) -> tuple[list[Message], dict[str, Said]]:
        """The messages with marks in place of what they say, and what the marks stand for. `only`: mark this message
        alone. The first messages of a conversation get the same marks alone as within the whole conversation."""
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
        """The shape of a conversation that is `marked` already. `values`: what else the template is told, as a text."""
        name = repr((marked, tools, values, flags, date.today() if self._dated else None))
        if (known := self._known.get(name)) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[name] = Shape.of(*render(marked, tools, **flags))
        return known


@dataclass(frozen=True, slots=True)
class Filled:
    """A shape that becomes `text` when the marks are replaced by what they stand for. `starts`: where in the text each
    gap begins. `places`: where in the text the words of each mark stand, in the order in which they are shown."""

    text: str
    shape: Shape
    starts: tuple[int, ...] = (0,)
    places: Spans = ()

    def goes_on(self, shorter: Shape) -> tuple[int, str, str] | None:
        """(where in this text the last words of a `shorter` conversation end, what the template writes behind them here
        up to the next words, what it writes behind them in `shorter` up to its end). None where these words are shown
        here twice or not at all."""
        gap = 0
        if shorter.marks:
            if self.shape.marks.count(shorter.marks[-1]) != 1:
                return None
            gap = self.shape.marks.index(shorter.marks[-1]) + 1
        return self.starts[gap], self.shape.gaps[gap], shorter.gaps[-1]

    def is_marked_alike(self, spans: Spans) -> bool:
        """Whether the template's marked `spans` of the text agree with its spans of the shape. Each edge must be at the
        same place of the same gap, or within the words at which it is in the shape."""
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
    """The shape with its marks replaced by their words, as they are or in a form in which templates write them. None
    where the result is not `text`; the shape then proves nothing about the text."""
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
    """Yield the forms in which templates write what is said: as it is, stripped, or as JSON."""
    yield words
    yield from {words.rstrip(): 0, words.lstrip(): 0, words.strip(): 0}
    yield json.dumps(words, ensure_ascii=False)[1:-1]


def private_character(text: str) -> str:
    """A private-use character that does not occur in the text."""
    return next(mark for mark in map(chr, range(_FIRST_MARK, sys.maxunicode + 1)) if mark not in text)

"""What a chat template writes around what is said: conversations rendered with marks in place of their words."""

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

from planner.job.records import Message
from worker.data.turns import Spans

Render = Callable[..., tuple[str, Spans]]
"""A conversation's text and what the template marks in it: `render(messages, tools, **flags)`."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message whose text is said beside its content."""
_WORDS = ("content", *THOUGHTS)
_FIRST_MARK = 0xF0000
_MARKS = re.compile("([\U000f0000-\U0010ffff])")  # Unicode's planes for private use
_NAMED = re.compile(r"</?\w+>")
_MOST_KNOWN = 1024


class Said(NamedTuple):
    """A text that a mark stands for: in which message, counted from 0, under which of its keys."""

    message: int
    key: str
    text: str


@dataclass(frozen=True)
class Shape:
    """A rendering with marks: the marks in the order in which they are shown, the gaps between them, one more than
    there are marks, and what the template marks as the assistant's (in characters of the rendering)."""

    gaps: tuple[str, ...]
    marks: tuple[str, ...] = ()
    spans: Spans = ()

    @classmethod
    def of(cls, text: str, spans: Spans = ()) -> Shape:
        """The shape that a rendering has."""
        pieces = _MARKS.split(text)
        return cls(tuple(pieces[::2]), tuple(pieces[1::2]), spans)

    @cached_property
    def shown(self) -> frozenset[str]:
        """Each mark, however often it is shown."""
        return frozenset(self.marks)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Where each of the spans begins and ends: in which gap, and how many characters from its beginning on."""
        begins = [0, *accumulate(len(gap) + 1 for gap in self.gaps)]
        gaps = [(bisect_right(begins, edge) - 1, edge) for span in self.spans for edge in span]
        return [(gap, edge - begins[gap]) for gap, edge in gaps]


class Shapes:
    """Renders the shapes of conversations; one that many conversations have is rendered once."""

    def __init__(self, template: str) -> None:
        """`template`: the tags that it names are no words. Where it looks for one in what is said, as for `</think>`,
        the words around it are marked and the tag stays."""
        tags = sorted(set(_NAMED.findall(template)))
        self._tags = re.compile(f"({'|'.join(tags)})") if tags else None
        self._dated = "strftime_now" in template
        self._known: dict[str, Shape] = {}

    def marked(self, messages: Sequence[Message], only: int | None = None) -> tuple[list[Message], dict[str, Said]]:
        """The messages with marks in place of what they say, or what one of them says, and what the marks stand for.
        The first messages of a conversation have the marks that they have in the whole."""
        said: dict[str, Said] = {}
        found = []
        for index, message in enumerate(messages):
            if only is None or only == index:
                message = {**message}
                for key in _WORDS:
                    if isinstance(words := message.get(key), str):
                        message[key] = self._marks(index, key, words, said)
            found.append(message)
        return found, said

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
        """The shape of a conversation that is marked already; `values`: what else the template is told, in words."""
        name = repr((marked, tools, values, flags, date.today() if self._dated else None))
        if (known := self._known.get(name)) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[name] = Shape.of(*render(marked, tools, **flags))
        return known


@dataclass(frozen=True, slots=True)
class Filled:
    """A shape whose marks' texts, put in their places, make `text`. `starts`: where in it each gap begins; `places`:
    where what each mark stands for is, in the order in which they are shown."""

    text: str
    shape: Shape
    starts: tuple[int, ...] = (0,)
    places: Spans = ()

    def goes_on(self, shorter: Shape) -> tuple[int, str, str] | None:
        """Where in the text the last words of a `shorter` conversation end; what the template writes behind them here,
        up to the next words, and there, up to the end. None where these words are shown here twice, or not at all."""
        gap = 0
        if shorter.marks:
            if self.shape.marks.count(shorter.marks[-1]) != 1:
                return None
            gap = self.shape.marks.index(shorter.marks[-1]) + 1
        return self.starts[gap], self.shape.gaps[gap], shorter.gaps[-1]

    def is_marked_alike(self, spans: Spans) -> bool:
        """Whether the template marks these `spans` of the text where it marks the shape: each of them begins and ends
        in the same place of the same gap, or within the words that it begins or ends at in the shape."""
        if len(spans) != len(self.shape.spans):
            return True  # more, or fewer, for what is said
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
    """The shape with the words themselves in their places, as they are or as templates write them; None where that is
    not `text`, so that the shape proves nothing of it."""
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
    """How templates write what is said: as it is, stripped, or as JSON."""
    yield words
    yield from {words.rstrip(): 0, words.lstrip(): 0, words.strip(): 0}
    yield json.dumps(words, ensure_ascii=False)[1:-1]


def private_character(text: str) -> str:
    """A character that is not in the text: it neither begins nor ends like anything there."""
    return next(mark for mark in map(chr, range(_FIRST_MARK, sys.maxunicode + 1)) if mark not in text)

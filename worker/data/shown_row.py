"""Shows a row of the data to people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """A row of training data as text. `pieces`: its texts, each with whether it is learned. `tokens`, `learned`: how
    many tokens the row has, and how many of them are learned. `places`: where its records stand in the data, in words,
    as far as that is known."""

    pieces: tuple[tuple[str, bool], ...]
    tokens: int
    learned: int
    places: tuple[str, ...] = ()

    def marked(self, most: int, begin: str = "⟦", end: str = "⟧") -> str:
        """The row's text, with its learned parts between the marks `begin` and `end`. The middle of a text longer than
        `most` characters is cut out; a learned part next to the gap keeps both marks."""
        half, length = most // 2, sum(len(text) for text, _ in self.pieces)
        if length <= most:
            return _between(self.pieces, begin, end)
        first, last, at = [], [], 0
        for text, learned in self.pieces:
            first.append((text[: max(0, half - at)], learned))
            last.append((text[max(0, length - half - at) :], learned))
            at += len(text)
        return f"{_between(first, begin, end)} … {_between(last, begin, end)}"


def _between(pieces: Sequence[tuple[str, bool]], begin: str, end: str) -> str:
    return "".join(f"{begin}{text}{end}" if learned else text for text, learned in pieces if text)

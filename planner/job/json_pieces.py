"""What a JSON file of training data is made of: records, and lines that are none. No torch.

Submission and the trainer split files by it alike, and what `broken_rows: skip` leaves out is the same for both.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from planner.job.records import Record

_DECODER = json.JSONDecoder()
_BOM, _SPACES = b"\xef\xbb\xbf", " \t\r\n"
_LINE_END = re.compile(r"[ \t\r]*(\n|$)?")
_TOO_DEEP = "nested too deeply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A line with its values, the lines that one value goes over, or an element of an array: `place` is "line 3 of
    a.jsonl". Either all its values are `records`, or none is, and `wrong` says what it is: "no JSON: …". `text`: what
    stands there, on one line; `lines`: how many it goes over."""

    place: str
    text: str
    records: tuple[Record, ...] = ()
    wrong: str | None = None
    lines: int = 1


def json_pieces(name: str, lines: Iterable[bytes], *, whole: bool = True) -> Iterator[Piece]:
    """The pieces of the file `name`, in order; blank lines are none. `lines` are all it has, or (not `whole`) those at
    its beginning: then what goes on behind them is left out, as is an array.

    A value may go over several lines. Where these turn out to be no JSON, the first of them is a broken line, and
    reading goes on with the next. Raises ValueError for an array that is not one.
    """
    source = iter(lines)
    source = chain([next(source, b"").removeprefix(_BOM)], source)
    ahead: deque[str] = deque()  # bytes that are not UTF-8 are in it as `surrogateescape` has them

    def is_there(count: int) -> bool:
        more = islice(source, max(0, count - len(ahead)))
        ahead.extend(line.decode("utf-8", "surrogateescape") for line in more)
        return len(ahead) >= count

    number, began = 1, False
    while is_there(1):
        if not ahead[0].strip(_SPACES):
            ahead.popleft()
            number += 1
            continue
        if not began and ahead[0].lstrip(_SPACES).startswith("["):
            if whole:
                yield from _elements(name, ahead[0].encode("utf-8", "surrogateescape") + b"".join(source))
            return
        began, place, size = True, f"line {number} of {name}", 1
        first = found = _values(ahead[0])
        while found.goes_on and is_there(size + 1):
            size *= 2  # else a value of many lines would be read as often
            is_there(size)
            found = _values("".join(islice(ahead, size)))
        if found.goes_on and not whole:
            return
        taken = found.text.count("\n") + 1 if found.wrong is None else 1
        if found.wrong is None:
            yield _piece(place, found.text, found.values, lines=taken)
        else:
            yield Piece(place=place, text=first.text, wrong=first.wrong)
        for _ in range(taken):
            ahead.popleft()
        number += taken


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """The `values` that a text begins with, as far as the first line's end that is none of theirs; `text`: so far. Or
    what is `wrong`; `goes_on`: no more than that the text ends too early."""

    text: str
    values: Sequence[Any] = ()
    wrong: str | None = None
    goes_on: bool = False


def _values(text: str) -> _Values:
    values: list[Any] = []
    at = len(text) - len(text.lstrip(_SPACES))
    try:
        while True:
            value, at = _DECODER.raw_decode(text, at)
            values.append(value)
            end = _LINE_END.match(text, at)
            assert end is not None
            if end[1] is not None:
                return _Values(text=text[:at], values=values)
            at = end.end()
    except json.JSONDecodeError as error:
        past = len(text.rstrip(_SPACES))
        wrong = _not_utf8(text) or f"no JSON: {error.msg} (character {min(error.pos, past) + 1})"
        return _Values(text=text, wrong=wrong, goes_on=error.pos >= past)
    except ValueError:
        return _Values(text=text, wrong="no JSON: a number of too many digits")
    except RecursionError:
        return _Values(text=text, wrong=_TOO_DEEP)


def _elements(name: str, content: bytes) -> Iterator[Piece]:
    """The elements of an array; texts are records of a column text."""
    try:
        values = json.loads(content.decode())
        if all(isinstance(value, str) for value in values):
            values = [{"text": value} for value in values]
        texts = [json.dumps(value) for value in values]
    except RecursionError as error:
        raise ValueError(f"{name} is {_TOO_DEEP}") from error
    for number, (value, text) in enumerate(zip(values, texts, strict=True), start=1):
        yield _piece(f"record {number} of {name}", text, [value])


def _piece(place: str, text: str, values: Sequence[Any], *, lines: int = 1) -> Piece:
    wrong, text = _not_utf8(text), text.strip(_SPACES).replace("\n", " ")
    if wrong is None and not all(isinstance(value, dict) for value in values):
        wrong = f"no object with columns: {text[:80]}"
    return Piece(place=place, text=text, records=() if wrong is not None else tuple(values), wrong=wrong, lines=lines)


def _not_utf8(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = len(text[: error.start].encode())
        return f"not UTF-8: byte {before} is 0x{ord(text[error.start]) - 0xDC00:02x}"
    return None

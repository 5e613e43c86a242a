"""Reads JSON values as Python's `json` does, and finds mistakes that `json` ignores. Does not import torch."""

from __future__ import annotations

import json
from typing import Any

MOST_DEPTH = 100
"""The most levels of lists and objects inside one another that a value may have. Chat templates and `copy` recurse into
values, and Python's stack is limited."""


def json_in(text: str) -> Any:
    """Return the JSON value in a text that holds exactly one. Raises ValueError whose text follows a subject such as
    "it": "is no JSON: …"."""
    values, start = JsonValues(), len(text) - len(text.lstrip())
    try:
        value, end = values.at(text, start)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error.msg} (character {error.pos + 1})") from None
    except ValueError:
        raise ValueError("is no JSON: a number of too many digits") from None
    if text[end:].strip():
        raise ValueError("is JSON of more than one value")
    if wrong := values.wrong(text, [value]):
        raise ValueError(wrong)
    return value


class JsonValues:
    """A JSON reader that also finds what Python's `json` ignores, such as the same key twice in one object."""

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)
        self._twice: str | None = None

    def at(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at index `start` of `text`, and the index where it ends. Raises ValueError for
        invalid JSON, RecursionError for a value nested too deeply."""
        return self._decoder.raw_decode(text, start)

    def wrong(self, text: str, values: list[Any]) -> str:
        """Return what is wrong with `values`, which `at` has just read from `text`: text that is not UTF-8, a duplicate
        key, too deep nesting, or half a surrogate pair. "" for nothing. Forgets the duplicate keys noted so far."""
        twice, self._twice = self._twice, None
        if not text.isascii() and (byte := not_utf8(text)):
            return byte
        if twice is not None:
            return f"has the key {json.dumps(twice, ensure_ascii=False)} twice in one object"
        if text.count("{") + text.count("[") > MOST_DEPTH and _depth(values) > MOST_DEPTH + 1:
            return "is nested too deeply"
        if "\\u" in text:
            try:
                json.dumps(values, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                return f"has half of a surrogate pair, \\u{ord(error.object[error.start]):04x}, which is no text"
        return ""

    def forget(self) -> None:
        """Forget the duplicate keys noted so far, before a text is read again."""
        self._twice = None

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs) and self._twice is None:
            names = [name for name, _ in pairs]
            self._twice = next(name for name in names if names.count(name) > 1)
        return members


def _depth(value: Any) -> int:
    """Return how many levels of lists and objects are inside one another."""
    depth, level = 0, [value]
    while level := [child for child in level if isinstance(child, (dict, list))]:
        depth += 1
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    return depth


def not_utf8(text: str) -> str:
    """Return what is wrong with a text that was decoded with `surrogateescape` from bytes that are not UTF-8, naming
    the first such byte; "" for valid text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = len(text[: error.start].encode())
        return f"is not UTF-8: byte {before} is 0x{ord(text[error.start]) - 0xDC00:02x}"
    return ""

"""Formats and parses sizes and durations, and makes text from elsewhere safe to print. Sizes are rounded up, budgets
down."""

from __future__ import annotations

import json
import re
import unicodedata
from decimal import Decimal, InvalidOperation

SMALLEST_BUDGET_BYTES = 512
"""A memory budget below this many bytes is refused: no job fits into it, so its unit must have been forgotten."""
_FACTORS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "m": 10**6,
    "mb": 10**6,
    "g": 10**9,
    "gb": 10**9,
    "t": 10**12,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*")


def printable(text: str) -> str:
    """`text` with each character that steers a terminal or is invisible replaced by U+FFFD, since models and data may
    contain anything."""
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def escaped(text: str) -> str:
    """The JSON `text` with ASCII escapes for characters that `printable` would replace; its parsed value is the
    same."""
    if text.isprintable():
        return text
    return "".join(c if _is_shown(c) or c == "\n" else json.dumps(c)[1:-1] for c in text)


def _is_shown(character: str) -> bool:
    """Whether a character is shown. Python calls most spaces not printable, but many languages use them."""
    return character.isprintable() or unicodedata.category(character) == "Zs"


def counted(count: float, one: str, many: str | None = None) -> str:
    """A number with its noun: "1 row", "12 rows", "1.5 epochs". `many`: the plural if it is not `one` with an s, such
    as "entries"."""
    shown = f"{count:g}" if isinstance(count, float) else str(count)
    return f"{shown} {one if count == 1 else many or f'{one}s'}"


def parse_bytes(text: str | int) -> int:
    """The bytes that "10GiB", "500 MB" or 1024 stand for, rounded down. Raises ValueError."""
    if isinstance(text, bool):
        raise ValueError(f"not a size: {json.dumps(text)}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size is not negative: {text}")
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"not a size: {json.dumps(text, ensure_ascii=False)} (write it like 10GiB or 500MB)")
    try:
        return int(Decimal(match[1]) * _FACTORS[match[2].lower()])
    except InvalidOperation:
        raise ValueError(f"not a size: {json.dumps(text, ensure_ascii=False)} (write it like 10GiB or 500MB)") from None


def format_bytes(count: int) -> str:
    """A size as text, such as "7.4 GiB": one decimal, rounded up, so that a size is never understated."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            tenths = -(-count * 10 // factor)
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{count} B"


def format_bytes_down(count: int) -> str:
    """A budget as text, such as "11.9 GiB": one decimal, rounded down, so that a budget never looks larger than
    it is."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            tenths = count * 10 // factor
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{count} B"


def format_part(used: int, budget: int) -> str:
    """A used part of a budget as text: "6.1 GiB of 11.9 GiB"; "all of 11.9 GiB" if rounding would make `used` look
    larger than `budget`. Both are in bytes."""
    full, part = format_bytes_down(budget), format_bytes(used)
    near = format_bytes(budget)
    return f"all of {full}" if used <= budget and part == near != full else f"{part} of {full}"


def format_seconds(seconds: float) -> str:
    """A duration as text, such as "1.2 ms", "3.4 s" or "2 h 05 min"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"

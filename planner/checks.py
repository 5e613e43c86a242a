"""Checks the numbers in dataclasses when an instance is made."""

from __future__ import annotations

import math
from dataclasses import fields


def check_numbers(value: object) -> None:
    """Raise ValueError if a number in the dataclass instance `value` is negative or not finite. The error names the
    field."""
    for field in fields(value):  # type: ignore[arg-type]
        number = getattr(value, field.name)
        if isinstance(number, (int, float)) and not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{type(value).__name__}.{field.name} is {number}; it must be finite, zero or more")

"""What repeated measurements came to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some numbers."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Spread:
        """Raises ValueError when there are none."""
        found = sorted(numbers)
        if not found:
            raise ValueError("nothing was measured")
        return cls(statistics.median(found), found[0], found[-1])

    @classmethod
    def of_ratios(cls, numbers: Iterable[float], bases: Iterable[float]) -> Spread:
        """Each number over its own base, which was measured beside it: a slow moment of the machine meets both."""
        return cls.of(number / base for number, base in zip(numbers, bases, strict=True))

    def __format__(self, spec: str) -> str:
        """ "1.013 (0.938, 1.194)", each number in the given form."""
        return f"{self.median:{spec}} ({self.least:{spec}}, {self.greatest:{spec}})"

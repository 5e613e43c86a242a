"""Sizes, counts and foreign text in words."""

from __future__ import annotations

import pytest

from planner.units import counted


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1.0, "1 row"), (1.5, "1.5 rows")]
)  # fmt: skip
def test_a_number_and_its_noun_agree(count: float, told: str) -> None:
    assert counted(count, "row") == told


def test_a_plural_of_its_own_is_given() -> None:
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]

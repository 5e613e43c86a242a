"""Sizes, counts and foreign text in words."""

from __future__ import annotations

import json

import pytest

from planner.units import counted, escaped, printable


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1.0, "1 row"), (1.5, "1.5 rows")]
)
def test_a_number_and_its_noun_agree(count: float, told: str) -> None:
    assert counted(count, "row") == told


def test_a_plural_of_its_own_is_given() -> None:
    assert [counted(count, "entry", "entries") for count in (1, 2)] == ["1 entry", "2 entries"]


def test_what_steers_a_terminal_or_hides_is_replaced_and_all_that_is_written_stays() -> None:
    steers = "a\x1b[31mb\u202ec\u200bd\u2028e\rf"
    assert printable(steers) == "a\ufffd[31mb\ufffdc\ufffdd\ufffde\ufffdf"
    written = "two\nlines\tof «texte\u202f», 日本\u3000語, \N{NO-BREAK SPACE}é 🙂"
    assert printable(written) == written


def test_json_says_the_same_in_characters_that_are_seen() -> None:
    value = {"name": "a\u202eb\u200bc\U000e0041 日本\u3000語", "of": ["\x1b"]}
    text = escaped(json.dumps(value, indent=2, ensure_ascii=False))
    assert json.loads(text) == value
    assert "日本\u3000語" in text and "\\u202e" in text
    assert printable(text) == text

"""What the rows of a JSON file are, whoever reads it."""

from __future__ import annotations

import io
import json
from itertools import islice
from typing import Any

import pytest

from planner.data.json_rows import json_rows
from planner.data.json_values import MOST_DEPTH


def rows(text: str | bytes, *, whole: bool = True) -> list[tuple[int, Any]]:
    """Of each row the number of its line or element, and its text, its record, or what is wrong with it."""
    content = text if isinstance(text, bytes) else text.encode()
    return [
        (int(row.place.split()[1]), row.wrong or (row.record or {}).get("text", row.record))
        for row in json_rows("a", io.BytesIO(content), whole=whole)
    ]


def test_a_line_may_have_several_values_and_a_value_several_lines() -> None:
    text = '\n{"text": "a"}{"text": "b"}\nnull\n{\n"text":\n"c"\n} {"text": "d"\n}\r\n{"text": "e"}'
    assert rows(text) == [(2, "a"), (2, "b"), (3, "is no JSON object: null"), (4, "c"), (4, "d"), (9, "e")]
    assert rows(json.dumps({"text": "a", "more": [*range(99)]}, indent=1)) == [(1, "a")]


def test_of_lines_that_are_no_json_the_first_is_broken_and_reading_goes_on_behind_it() -> None:
    value, comma = "is no JSON: Expecting value (character 9)", "is no JSON: Expecting value (character 14)"
    assert rows('{"text":\n{"text": "a"}\n{"text": "b"}\n') == [(1, value), (2, "a"), (3, "b")]
    assert rows('{"text": "a"},\n{"text": "b"}\n{"text":') == [(1, comma), (2, "b"), (3, value)]
    assert rows("{\n" * 40 + '{"text": "a"}\n')[-1] == (41, "a")
    assert rows('{"text": "a\n{"text": "b"}\n')[1:] == [(2, "b")], "a quote that is not closed"


def test_a_broken_line_gives_no_records() -> None:
    what = 'is no JSON object: {"text": "a"} 7'
    assert rows('{"text": "a"} 7\n{\n"text":"b"} [1\n]\n{"text": "c"}\n') == [
        (1, what),
        (2, 'is no JSON object: { "text":"b"} [1 ]'),
        (5, "c"),
    ]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ("[" * 5000 + "]" * 5000, "is nested too deeply"),
        ("[" * MOST_DEPTH + "]" * MOST_DEPTH, "is nested too deeply"),
        ('"\\ud83d"', "has half of a surrogate pair, \\ud83d, which is no text"),
        ('{"\\uDC00": 1}', "has half of a surrogate pair, \\udc00, which is no text"),
        ('{"city": {"a": 1, "b": 2, "a": 3}}', 'has the key "a" twice in one object'),
        ('"caf\udce9"', "is not UTF-8: byte 13 is 0xe9"),
    ],
)
def test_a_value_that_no_text_can_be_made_of_breaks_its_row_alone(value: str, wrong: str) -> None:
    broken, good = f'{{"text": {value}}}', '{"text": "a"}'
    lines = f"{good}\n{broken}\n{good}\n".encode(errors="surrogateescape")
    assert rows(lines) == [(1, "a"), (2, wrong), (3, "a")]
    array = f"[{good},\n{broken}, {good}]".encode(errors="surrogateescape")
    assert rows(array) == [(1, "a"), (2, wrong), (3, "a")]


def test_whole_surrogate_pairs_and_halves_that_are_written_out_are_text() -> None:
    assert rows('{"text": "\\ud83d\\ude00"}\n{"text": "\\\\ud83d"}') == [(1, "😀"), (2, "\\ud83d")]


def test_numbers_nulls_and_the_order_of_keys_are_as_they_are_written() -> None:
    text = '{"b": 3, "a": {"z": null, "y": 3.0, "x": 12345678901234567890}}'
    assert json.dumps(rows(text)[0][1]) == text
    digits = "1" * 5000
    assert rows(f'{{"text": {digits}}}\n{{"text": "a"}}') == [(1, "is no JSON: a number of too many digits"), (2, "a")]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert rows('\ufeff{"text": "a"}\n') == rows('\ufeff[{"text": "a"}]') == [(1, "a")]


def test_a_file_that_begins_with_a_bracket_is_one_array_or_cannot_be_read() -> None:
    none = "is no JSON object"
    assert rows('\n [{"text": "a"},\n7, null]') == [(1, "a"), (2, f"{none}: 7"), (3, f"{none}: null")]
    assert rows('["a", {"text": "b"}]\n') == [(1, "a"), (2, "b")]
    assert rows("[]") == rows("") == rows("\n") == []
    for wrong in ('[{"text": "a"}, {"text"]', '[1]\n{"text": "a"}\n', "[1 2]", "[1,]", '[{"text": "a'):
        with pytest.raises(ValueError, match=r"a is no JSON array: (Expecting|Extra data|Unterminated)"):
            rows(wrong)
    with pytest.raises(ValueError, match=r"Expecting value \(line 3\)"):
        rows('[{"text": "a"},\n{"text": "b"},\n{"text": }]')


def test_of_a_files_beginning_what_goes_on_behind_it_is_left_out() -> None:
    lines, array = '{"text": "a"}\n{\n"text": "bc"}\n', '[{"text": "a"}, {"text": "bc"}]'
    for cut in range(len(lines)):
        assert rows(lines[:cut], whole=False) == [(1, "a")][: cut // 14]
    for cut in range(len(array)):
        assert rows(array[:cut], whole=False) == [(1, "a"), (2, "bc")][: (cut > 14) + (cut > 30)]


def test_values_and_signs_that_two_readings_part_are_whole() -> None:
    class OneByOne(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(1, -1 if size is None else size) or 1)

    values: list[Any] = [{"text": "ü😀", "n": -1.5e-7, "b": [True, None, "\\"]}, {"text": "b"}]
    for text in ("\n".join(map(json.dumps, values)), json.dumps(values), json.dumps(values, ensure_ascii=False)):
        assert [row.record for row in json_rows("a", OneByOne(text.encode()))] == values


def test_no_more_of_a_file_is_read_than_is_asked_for() -> None:
    class Endless(io.BytesIO):
        given = 0

        def read(self, size: int | None = -1) -> bytes:
            self.given += 2**20
            return b'{"text": "a"}\n' * (2**20 // 14)

    file = Endless()
    assert [row.place for row in islice(json_rows("a", file), 2)] == ["line 1 of a", "line 2 of a"]
    assert file.given == 2**20

"""What a JSON file of training data is made of, whoever reads it."""

from __future__ import annotations

import io
import json
from itertools import count, islice

import pytest

from planner.job.json_pieces import json_pieces


def pieces(text: str | bytes, *, whole: bool = True) -> list[tuple[int, str]]:
    """Of each piece the number of its line and its records' texts, or what is wrong with it."""
    content = text if isinstance(text, bytes) else text.encode()
    return [
        (int(piece.place.split()[1]), piece.wrong or " ".join(str(record.get("text")) for record in piece.records))
        for piece in json_pieces("a", io.BytesIO(content), whole=whole)
    ]


def test_a_line_may_have_several_values_and_a_value_several_lines() -> None:
    text = '\n{"text": "a"}{"text": "b"}\nnull\n{\n"text":\n"c"\n} {"text": "d"\n}\r\n{"text": "e"}'
    assert pieces(text) == [(2, "a b"), (3, "no object with columns: null"), (4, "c d"), (9, "e")]
    assert pieces(json.dumps({"text": "a", "more": [*range(99)]}, indent=1)) == [(1, "a")]


def test_of_lines_that_are_no_json_the_first_is_broken_and_reading_goes_on_behind_it() -> None:
    value, comma = "no JSON: Expecting value (character 9)", "no JSON: Expecting value (character 14)"
    assert pieces('{"text":\n{"text": "a"}\n{"text": "b"}\n') == [(1, value), (2, "a"), (3, "b")]
    assert pieces('{"text": "a"},\n{"text": "b"}\n{"text":') == [(1, comma), (2, "b"), (3, value)]
    assert pieces("{\n" * 40 + '{"text": "a"}\n')[-1] == (41, "a")


def test_a_broken_line_gives_no_records() -> None:
    what = 'no object with columns: {"text": "a"} 7'
    assert pieces('{"text": "a"} 7\n{\n"text":"b"} [1\n]\n{"text": "c"}\n') == [
        (1, what), (2, 'no object with columns: { "text":"b"} [1 ]'), (5, "c"),
    ]  # fmt: skip


def test_lines_that_are_nested_too_deeply_or_not_utf8_are_broken() -> None:
    deep = '{"text": ' + "[" * 5000 + "]" * 5000 + "}\n"
    assert pieces(deep + '{"text": "a"}\n') == [(1, "nested too deeply"), (2, "a")]
    latin = '{"text": "ü"}\n'.encode() + '{"text": "ü"}\n{"text": "ä'.encode("latin-1")
    assert pieces(latin) == [(1, "ü"), (2, "not UTF-8: byte 10 is 0xfc"), (3, "not UTF-8: byte 10 is 0xe4")]


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert pieces('\ufeff{"text": "a"}\n') == pieces('\ufeff[{"text": "a"}]') == [(1, "a")]


def test_a_file_that_begins_with_a_bracket_is_one_array_or_cannot_be_read() -> None:
    none = "no object with columns"
    assert pieces('\n [{"text": "a"},\n7, null]') == [(1, "a"), (2, f"{none}: 7"), (3, f"{none}: null")]
    assert pieces('["a", "b"]') == [(1, "a"), (2, "b")]
    for wrong in ('[{"text": "a"}, {"text"]', '[1]\n{"text": "a"}\n', "[" * 5000 + "]" * 5000):
        with pytest.raises(ValueError, match=r"Expecting|Extra data|a is nested too deeply"):
            pieces(wrong)


def test_of_a_files_beginning_what_goes_on_behind_it_is_left_out() -> None:
    assert pieces('{"text": "a"}\n{"text":\n', whole=False) == [(1, "a")]
    assert pieces('[{"text": "a"},\n', whole=False) == []


def test_a_piece_is_written_on_one_line() -> None:
    (piece,) = json_pieces("a", io.BytesIO(b'\xef\xbb\xbf {\r\n"text":\n"a"} \n'))
    assert json.loads(piece.text) == {"text": "a"} and "\n" not in piece.text


def test_no_more_of_a_file_is_read_than_is_asked_for() -> None:
    endless = (f'{{"text": "{number}"}}\n'.encode() for number in count(1))
    assert [piece.place for piece in islice(json_pieces("a", endless), 2)] == ["line 1 of a", "line 2 of a"]
    assert next(endless) == b'{"text": "3"}\n'

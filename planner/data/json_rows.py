"""Reads the rows of a JSON file: one value per line, values over several lines, or the elements of one array. Does not
import torch.

Each row is the value that Python's `json` reads at its place. Nothing else in the file changes it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, BinaryIO

from planner.data.json_values import JsonValues, not_utf8
from planner.data.records import Record

_PIECE = 2**20  # bytes read at a time
_SPACES = " \t\r\n"
_BLANK = re.compile(r"[ \t\r\n]*")
_LINE_END = re.compile(r"[ \t\r]*(\n|$)?")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_CUT_NEAR = 16  # characters before the end where a number, a word or an escape may be cut off


@dataclass(frozen=True, slots=True)
class Row:
    """What a data file has at one place: a record, or the reason why it is none.

    `place`: where it is, in words, such as "line 3 of a.jsonl". `record`: the record; None where there is none. `wrong`
    then says why, in words that follow the place: "is no JSON: Expecting value (character 9)".
    """

    place: str
    record: Record | None = None
    wrong: str = ""


def json_rows(name: str, file: BinaryIO, *, whole: bool = True) -> Generator[Row]:
    """Yield the rows of the JSON file `name`, in order. Blank lines are skipped. A text in an array becomes the record
    {"text": …}.

    `whole`: `file` is the whole file. Otherwise it is only the beginning, and an unfinished last line is skipped. A
    value may extend over several lines. Where these are no valid JSON, the first of them becomes a broken row and
    reading continues with the next line. Raises ValueError where an array is broken, because nothing shows where its
    next element begins.
    """
    text = _Text(file)
    _skip_blank_lines(text)
    if text.text[text.at :].lstrip(_SPACES).startswith("["):
        text.skip_blank()
        yield from _elements(name, text, whole)
    else:
        yield from _lines(name, text, whole)


class _Text:
    """The text of a file, read and decoded one piece at a time. Bytes that are not UTF-8 are kept as surrogates
    (`surrogateescape`).

    `text[at:]` is the part that was read from the file and not used yet; it begins on line `line`, counted from 1.
    `ended`: the file has nothing after it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self.text, self.at, self.line, self.ended = "", 0, 1, False
        while not self.text and self.more():
            pass
        self.text = self.text.removeprefix("\ufeff")

    def more(self) -> bool:
        """Read on, at least as many bytes as are still unused. Returns False at the end of the file."""
        if self.ended:
            return False
        # Doubling the size keeps the work for a long value small: it is parsed again after each piece.
        piece = self._file.read(max(_PIECE, len(self.text) - self.at))
        self.ended = not piece
        self.text, self.at = self.text[self.at :] + self._decoder.decode(piece, final=self.ended), 0
        return True

    def pass_to(self, end: int) -> None:
        """Mark `text[:end]` as used."""
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def skip_blank(self) -> None:
        """Skip spaces and line ends, reading on where needed."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            assert blank is not None
            self.pass_to(blank.end())
            if self.at < len(self.text) or not self.more():
                return

    def rest(self, count: int) -> str:
        """Return the next `count` characters; fewer at the end of the text read so far."""
        return self.text[self.at : self.at + count]

    def ends_early(self, error: json.JSONDecodeError) -> bool:
        """Return whether the error may come only from a value that is cut at the end of the text read so far."""
        near = error.pos >= len(self.text.rstrip(_SPACES)) or error.pos > len(self.text) - _CUT_NEAR
        return near or error.msg.startswith("Unterminated string")

    def line_end(self, start: int) -> int:
        """Return the index in `text` where the line with `start` ends: that of its "\\n", or the end of the file."""
        while (end := self.text.find("\n", start)) < 0 and not self.ended:
            start -= self.at
            self.more()
        return end if end >= 0 else len(self.text)


def _lines(name: str, text: _Text, whole: bool) -> Generator[Row]:
    decoder = JsonValues()
    while True:
        _skip_blank_lines(text)
        if text.at >= len(text.text):
            return
        place = f"line {text.line} of {name}"
        values: list[Any] = []
        try:
            values, end = _values(text, decoder)
            line = text.text[text.at : end]
            wrong = decoder.wrong(line, values)
            if not wrong and not all(isinstance(value, dict) for value in values):
                wrong = _no_object(line)
        except _CutError:
            if not whole:
                return
            end = text.line_end(text.at)
            wrong = _why_no_json(text.text[text.at : end])
        except _WrongError as error:
            end, wrong = error.end, str(error)
        if not whole and end >= len(text.text):  # the line is cut
            return
        yield from [Row(place, wrong=wrong)] if wrong else [Row(place, value) for value in values]
        text.pass_to(end)


class _WrongError(Exception):
    """Says what is wrong with the text up to the index `end`."""

    def __init__(self, wrong: str, end: int) -> None:
        super().__init__(wrong)
        self.end = end


class _CutError(Exception):
    """The file ends within a value."""


def _skip_blank_lines(text: _Text) -> None:
    """Skip blank lines, and stop at the beginning of the next line, not at its first character: positions in errors
    count from the line's beginning."""
    while True:
        blank = _BLANK.match(text.text, text.at)
        assert blank is not None
        if blank.end() < len(text.text):
            text.pass_to(max(text.at, text.text.rfind("\n", text.at, blank.end()) + 1))
            return
        if not text.more():
            text.pass_to(len(text.text))
            return


def _values(text: _Text, decoder: JsonValues) -> tuple[list[Any], int]:
    """Return the values up to the first line end that is outside of all values, and its index. Raises _WrongError where
    the first line is broken and can be skipped, _CutError where the file ends within a value."""
    while True:
        decoder.forget()
        values: list[Any] = []
        blank = _BLANK.match(text.text, text.at)
        assert blank is not None
        at = blank.end()
        try:
            while True:
                value, at = decoder.at(text.text, at)
                values.append(value)
                end = _LINE_END.match(text.text, at)
                assert end is not None
                if end[1] is not None:
                    break
                at = end.end()
            if end[1] or text.ended:
                return values, at
        except json.JSONDecodeError as error:
            if not text.ends_early(error):
                line = text.line_end(text.at)
                raise _WrongError(_why_no_json(text.text[text.at : line]), line) from error
            if text.ended:
                raise _CutError from error
        except RecursionError as error:
            if (past := _past(text.text, at)) is not None or text.ended:
                line = text.line_end(text.at if past is None else past)
                raise _WrongError("is nested too deeply", line) from error
        except ValueError as error:
            line = text.line_end(text.at)
            raise _WrongError("is no JSON: a number of too many digits", line) from error
        text.more()


def _why_no_json(line: str) -> str:
    """Return what is wrong with a line that is not valid JSON by itself."""
    if byte := not_utf8(line):
        return byte
    decoder, line = JsonValues(), line.rstrip(_SPACES)
    at = len(line) - len(line.lstrip(_SPACES))
    try:
        while at < len(line):
            _, at = decoder.at(line, at)
            at += len(line[at:]) - len(line[at:].lstrip(_SPACES))
    except json.JSONDecodeError as error:
        return f"is no JSON: {error.msg} (character {min(error.pos, len(line)) + 1})"
    except (ValueError, RecursionError):
        pass
    return "is no JSON"


def _elements(name: str, text: _Text, whole: bool) -> Generator[Row]:
    decoder, number = JsonValues(), 0
    text.pass_to(text.at + 1)
    text.skip_blank()
    is_closed = text.rest(1) == "]"
    while not is_closed:
        number += 1
        place = f"record {number} of {name}"
        try:
            value, end = _element(name, text, decoder)
        except _CutError as cut:
            if not whole:
                return
            raise ValueError(str(cut)) from cut
        except _WrongError as error:
            row, end = Row(place, wrong=str(error)), error.end
        else:
            wrong = decoder.wrong(text.text[text.at : end], [value])
            record = {"text": value} if isinstance(value, str) else value
            if not wrong and not isinstance(record, dict):
                wrong = _no_object(text.text[text.at : end])
            row = Row(place, wrong=wrong) if wrong else Row(place, record)
        text.pass_to(end)
        text.skip_blank()
        follows = text.rest(1)
        if not follows and not whole:
            return
        yield row
        if follows not in (",", "]"):
            raise _no_array(name, text, "Expecting ',' delimiter")
        is_closed = follows == "]"
        text.pass_to(text.at + (not is_closed))
        text.skip_blank()
    text.pass_to(text.at + 1)
    text.skip_blank()
    if text.rest(1):
        raise _no_array(name, text, "Extra data")


def _element(name: str, text: _Text, decoder: JsonValues) -> tuple[Any, int]:
    """Return the next value of an array, and the index where it ends. Raises _WrongError for a broken value that can be
    skipped, _CutError where the file ends within a value, ValueError for all else."""
    while True:
        decoder.forget()
        try:
            value, end = decoder.at(text.text, text.at)
            if end < len(text.text) or text.ended:  # else a number at the end of the text may go on
                return value, end
        except json.JSONDecodeError as error:
            wrong = _no_array(name, text, error.msg, error.pos)
            if not text.ends_early(error):
                raise wrong from error
            if text.ended:
                raise _CutError(str(wrong)) from error
        except RecursionError as error:
            if (past := _past(text.text, text.at)) is not None:
                raise _WrongError("is nested too deeply", past) from error
            if text.ended:
                raise _no_array(name, text, "Expecting ']'", len(text.text)) from error
        except ValueError as error:
            raise _no_array(name, text, "a number of too many digits") from error
        text.more()


def _no_array(name: str, text: _Text, what: str, at: int | None = None) -> ValueError:
    line = text.line + text.text.count("\n", text.at, text.at if at is None else at)
    return ValueError(f"{name} is no JSON array: {what} (line {line})")


def _no_object(text: str) -> str:
    line = text.strip(_SPACES).replace("\n", " ")
    return f"is no JSON object: {line[:80]}"


def _past(text: str, start: int) -> int | None:
    """Return the index behind the list or object that begins at `start`, found by counting brackets outside of strings.
    None where the text ends before."""
    depth = 0
    for token in _TOKENS.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth <= 0:
            return token.end()
    return None

"""What people are told, and how it travels between processes."""

from __future__ import annotations

import errno
import json
import sqlite3
from pathlib import Path

import pytest

from planner.errors import Exit, UserError, first_line, is_disk_full, is_out_of_memory
from planner.run.folder import RunFolder
from planner.run.watch import end_leftover
from tests.support.disks import no_room_beyond

FULL = UserError("It is wrong.", code="wrong", numbers=("1 of 2",), hint="mend it", exit_code=Exit.USAGE)
BARE = UserError("It is wrong.", code="wrong")
SHORT = UserError("It is too little.", code="too-little", had_bytes=3)


def test_an_error_is_told_as_sentence_numbers_hint_and_code() -> None:
    assert str(FULL) == "It is wrong.\n  1 of 2\n  hint: mend it   [wrong]"
    assert str(BARE) == "It is wrong.\n  [wrong]"


@pytest.mark.parametrize("error", [FULL, BARE, SHORT])
def test_an_error_comes_back_from_json_as_it_was(error: UserError) -> None:
    fields = json.loads(json.dumps(error.to_json()))
    back = UserError.from_json(fields)
    assert (str(back), back.exit_code) == (str(error), error.exit_code)
    assert back.to_json() == fields


@pytest.mark.parametrize("fields", [{}, {"what": "no more"}, FULL.to_json() | {"exit_code": 77}])
def test_an_object_that_is_no_error_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError)):
        UserError.from_json(fields)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  one\ntwo"), "one"),
        (KeyError(), "KeyError"),
        (OSError("x" * 400), "x" * 300),
    ],
)
def test_of_another_librarys_error_one_short_line_is_told(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_an_error_in_a_run_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for error in (FULL, BARE):
        run.write_error(error)
        assert run.read_error() == error.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_what_steers_a_terminal_is_not_told() -> None:
    error = UserError("a\x1b[31m", code="wrong", numbers=("b\x07\tc",), hint="\x9b1m\ud800")
    assert str(error) == "a�[31m\n  b�\tc\n  hint: �1m�   [wrong]"
    assert UserError.from_json(error.to_json()).to_json() == error.to_json()


class SomethingOfRust(Exception):
    """As safetensors raises it."""


FULL_DISKS = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    OSError(errno.EFBIG, "File too large"),
    SomethingOfRust("Error while serializing: I/O error: No space left on device (os error 28)"),
    sqlite3.OperationalError("database or disk is full"),
]


@pytest.mark.parametrize("error", FULL_DISKS)
def test_a_full_disk_is_known_whoever_says_it_and_whatever_came_of_it(error: Exception) -> None:
    assert is_disk_full(error)
    for link in ("__cause__", "__context__"):
        outcome = ValueError("cannot write")
        setattr(outcome, link, error)
        assert is_disk_full(outcome)


def test_other_errors_are_no_full_disk() -> None:
    circle = ValueError("(os error 2)")
    circle.__context__ = OSError(errno.EACCES, "Permission denied")
    circle.__context__.__context__ = circle
    assert not is_disk_full(circle)
    assert not is_disk_full(OSError("no number"))


def test_memory_that_ran_out_is_known_from_what_came_of_it() -> None:
    told = UserError("The database could not be upgraded.", code="database-not-upgraded")
    told.__cause__ = MemoryError()
    other = UserError("The database could not be upgraded.", code="database-not-upgraded")
    other.__cause__ = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert is_out_of_memory(told) and is_out_of_memory(other)
    assert not is_out_of_memory(UserError("The database could not be upgraded.", code="database-not-upgraded"))


def test_what_was_being_written_when_there_was_no_room_does_not_stay(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_error(BARE)
    with no_room_beyond(10), pytest.raises(OSError, match="File too large"):
        run.write_error(FULL)
    assert run.read_error() == BARE.to_json()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_what_a_killed_process_was_writing_goes_before_the_next_one(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_error(BARE)
    for name in (".error.json.new", "mine.new"):
        (tmp_path / name).write_text("{")
    end_leftover(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", "mine.new"]

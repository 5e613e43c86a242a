"""What people are told, and how it travels between processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import Exit, UserError, first_line
from planner.run.folder import RunFolder

FULL = UserError("It is wrong.", code="wrong", numbers=("1 of 2",), hint="mend it", exit_code=Exit.USAGE)
BARE = UserError("It is wrong.", code="wrong")


def test_an_error_is_told_as_sentence_numbers_hint_and_code() -> None:
    assert str(FULL) == "It is wrong.\n  1 of 2\n  hint: mend it   [wrong]"
    assert str(BARE) == "It is wrong.\n  [wrong]"


@pytest.mark.parametrize("error", [FULL, BARE])
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

"""What people are told, and how it travels between processes."""

from __future__ import annotations

import json

import pytest

from planner.errors import Exit, UserError

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

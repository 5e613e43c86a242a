"""How a job's process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import Exit, UserError
from planner.hub import not_reached
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from tests.support.disks import no_room_beyond

WRONG = UserError("It is wrong.", code="wrong", exit_code=Exit.USAGE)


def raises(error: BaseException) -> int:
    raise error


def test_what_a_process_returns_is_its_exit_code(tmp_path: Path) -> None:
    assert exit_code_of(lambda: 75, RunFolder(tmp_path)) == 75
    assert list(tmp_path.iterdir()) == []


def test_a_persons_error_is_said_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    assert exit_code_of(lambda: raises(WRONG), run) == exit_code_of(lambda: raises(WRONG), None) == Exit.USAGE
    assert run.read_error() == WRONG.to_json()
    assert capsys.readouterr().err == f"{WRONG}\n{WRONG}\n"


def test_a_hub_that_is_not_reached_is_written_down_for_who_says_when_it_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, error = RunFolder(tmp_path), not_reached("the model a/b", TimeoutError())
    assert exit_code_of(lambda: raises(error), run) == Exit.FAILED
    assert (run.read_error(), capsys.readouterr().err) == (error.to_json(), "")
    exit_code_of(lambda: raises(error), None)
    assert capsys.readouterr().err == f"{error}\n"


def test_a_full_disk_is_a_persons_error(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert exit_code_of(lambda: raises(OSError(28, "No space left on device", "/x")), run) == Exit.FAILED
    error = run.read_error()
    assert error is not None
    assert (error["code"], error["numbers"]) == ("disk-full", ["[Errno 28] No space left on device: '/x'"])
    assert error["hint"] == "free some space; a job then goes on by itself, from what it saved last"


def test_a_disk_that_does_not_even_take_the_error_is_told_by_the_exit_code(tmp_path: Path) -> None:
    with no_room_beyond(5):
        assert exit_code_of(lambda: raises(WRONG), RunFolder(tmp_path)) == Exit.NO_ROOM_TO_SAY
    assert list(tmp_path.iterdir()) == []


def test_our_own_mistakes_are_raised(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        exit_code_of(lambda: raises(KeyError("x")), RunFolder(tmp_path))

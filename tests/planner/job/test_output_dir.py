"""Where a trained model may go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.errors import UserError
from planner.job.output_dir import MARK, check_place


def refusal(folder: Path, run: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check_place(folder, run)
    return caught.value.code


def test_a_free_place_is_one_that_is_empty_or_not_there(tmp_path: Path) -> None:
    check_place(tmp_path)
    check_place(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert refusal(tmp_path) == refusal(tmp_path / "file") == "output-exists"
    assert refusal(tmp_path / "file" / "out") == "output-unwritable"


@pytest.mark.parametrize("mark", ["", "[]", "{}", '{"run": null}', '{"run": "another"}', "\\x00"])
def test_only_the_runs_own_output_may_be_replaced(mark: str, tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"run": "mine"}')
    check_place(tmp_path, "mine")
    assert refusal(tmp_path) == "output-exists"
    (tmp_path / MARK).write_text(mark)
    assert refusal(tmp_path, "mine") == "output-exists"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert refusal(tmp_path / "closed" / "out") == "output-unwritable"


def test_a_name_the_system_refuses_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / ("n" * 1000)) == "output-unwritable"

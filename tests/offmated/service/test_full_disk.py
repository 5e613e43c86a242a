"""A daemon on a disk that gets full. Some tests take seconds: they start a daemon, its broker and its workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.disks import run_on_small_disk


@pytest.mark.parametrize(("of", "options"), [((), "rw"), (("files",), "nr_inodes=600")], ids=["bytes", "files"])
def test_a_full_disk_refuses_what_is_new_shows_no_dead_trainer_as_running_and_costs_no_job(
    tmp_path: Path, of: tuple[str, ...], options: str
) -> None:
    log = tmp_path / "said"
    command = [sys.executable, "-m", "tests.support.full_disk_house", *of]
    assert run_on_small_disk(16 * 2**20, command, log, options) == 0, log.read_text("utf-8", errors="replace")

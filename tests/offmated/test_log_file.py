"""The daemon's log is kept short while the daemon and its children write to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from offmated.paths import Paths

WRITES = """
import os, subprocess, sys
from pathlib import Path
from offmated.log_file import keep_short
from offmated.paths import Paths
paths = Paths.at(Path(sys.argv[1]))
child = subprocess.Popen(["sh", "-c", "read go; echo from the child >&2"], stdin=subprocess.PIPE)
print("a long story", file=sys.stderr)
keep_short(paths, at_most=10)
print("new", file=sys.stderr)
keep_short(paths, at_most=1000)
child.communicate(b"go\\n")
"""


def told(paths: Paths, mode: str) -> None:
    paths.create()
    with paths.log.open(mode) as log:
        subprocess.run([sys.executable, "-c", WRITES, str(paths.state)], stderr=log, check=True)


def test_a_log_that_has_grown_long_is_put_aside_while_all_go_on_writing(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "s")
    told(paths, "ab")
    assert paths.log_before.read_text() == "a long story\n"
    assert paths.log.read_text() == "new\nfrom the child\n"


def test_a_log_that_would_go_on_behind_a_gap_or_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    paths = Paths.at(tmp_path / "s")
    told(paths, "wb")
    assert paths.log.read_text() == "a long story\nnew\nfrom the child\n"
    assert not paths.log_before.exists()
    with (tmp_path / "elsewhere").open("ab") as log:
        subprocess.run([sys.executable, "-c", WRITES, str(paths.state)], stderr=log, check=True)
    assert paths.log.read_text() == "a long story\nnew\nfrom the child\n"

"""Processes that hang are ended, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.run.folder import RunFolder
from tests import ROOT

WATCHED = """
import sys
from pathlib import Path
from planner.run.folder import RunFolder
from planner.run.watch import Watch
folder, command, limit_s = sys.argv[1:]
with Watch(lambda: False) as watch:
    print(watch.run([sys.executable, "-c", command, "planner"], RunFolder(Path(folder)), limit_s=float(limit_s)))
"""


def watched(run: RunFolder, command: str, limit_s: float) -> int:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(run.path), command, str(limit_s)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    "command",
    ["import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()",
     "import re; re.fullmatch('(.*.*.*.*.*)*x', 'model.layers.31.self_attn.q_proj')"],
    ids=["heeds nothing", "computes"],
)  # fmt: skip
def test_a_process_that_hangs_is_ended_and_the_job_has_failed_by_name(tmp_path: Path, command: str) -> None:
    run = RunFolder(tmp_path)
    assert watched(run, command, 2.0) == 1
    error = run.read_error()
    assert error is not None and error["code"] == "process-hangs"
    assert error["what"] == "The planner did not come to its end, and kept others from their turns."
    assert error["numbers"] == ["it was ended after 2.0 s"]
    assert not run.process.exists()


def test_a_process_within_its_limit_ends_by_itself(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert watched(run, "raise SystemExit(3)", 60.0) == 3
    assert run.read_error() is None

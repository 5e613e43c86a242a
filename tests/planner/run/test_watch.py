"""Processes that hang are ended, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests import ROOT
from tests.support.daemons import until

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
        [sys.executable, "-c", WATCHED, str(run.path), command, str(limit_s)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize(
    "command",
    [
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()",
        "import re; re.fullmatch('(.*.*.*.*.*)*x', 'model.layers.31.self_attn.q_proj')",
    ],
    ids=["heeds nothing", "computes"],
)
def test_a_process_that_hangs_is_ended_and_the_job_has_failed_by_name(tmp_path: Path, command: str) -> None:
    run = RunFolder(tmp_path)
    assert watched(run, command, 2.0) == 1
    error = run.read_error()
    assert error is not None and error["code"] == "process-hangs"
    assert error["what"] == "The planner had not ended after 2.0 s, and was killed: other jobs waited for it."
    assert not run.process.exists()


def test_a_process_within_its_limit_ends_by_itself(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert watched(run, "raise SystemExit(3)", 60.0) == 3
    assert run.read_error() is None


HAS_CHILDREN = """
import os, signal, subprocess, sys
from pathlib import Path
sleeps = [sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"]
children = [subprocess.Popen(sleeps), subprocess.Popen(sleeps, process_group=0)]
Path("children").write_text(" ".join(str(child.pid) for child in children))
"""


def children(run: RunFolder) -> list[Process]:
    """Those of the process that live."""
    pids = [int(pid) for pid in (run.path / "children").read_text().split()]
    assert len(pids) == 2
    return [process for pid in pids if (process := Process.of(pid)) is not None]


@pytest.mark.parametrize("end", ["signal.pause()", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_with_a_process_all_end_that_it_started(tmp_path: Path, end: str) -> None:
    run = RunFolder(tmp_path)
    watched(run, HAS_CHILDREN + end, 5.0)
    assert children(run) == []


def test_what_a_process_started_whose_watcher_died_ends_before_the_next(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    command = [sys.executable, "-c", WATCHED, str(run.path), HAS_CHILDREN + "signal.pause()", "600"]
    watcher = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until(lambda: (run.path / "children").exists() and len((run.path / "children").read_text().split()) == 2, "both")
    watcher.kill()
    watcher.wait()
    assert len(children(run)) == 2, "only the process itself died with its watcher"
    assert watched(run, "raise SystemExit(0)", 60.0) == 0
    assert children(run) == []

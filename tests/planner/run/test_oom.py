"""The kernel's out-of-memory killer, in a control group of the test's own where this machine lets one be made."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from planner.run import oom
from planner.run.folder import RunFolder
from tests import ROOT

LIMIT_BYTES = 256 * 2**20
ROOTS = ((Path("/sys/fs/cgroup"), "memory.max"), (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"))
#: Joins the group, runs a process that asks for ever more, and one that is killed by somebody.
WATCHED = """
import os, sys
from pathlib import Path
from planner.run.folder import RunFolder
from planner.run.watch import Watch
group, folder, command = sys.argv[1:]
(Path(group) / "cgroup.procs").write_text(str(os.getpid()))
with Watch(lambda: False) as watch:
    print(watch.run([sys.executable, "-c", command, "worker.trainer"], RunFolder(Path(folder))))
"""
HOG = "kept = []\nwhile len(kept) < 40: kept.append(bytearray(b'x' * 2**24))"  # bounded, should there be no limit
KILLED = "import os; os.kill(os.getpid(), 9)"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory and no swap."""
    made = next(filter(None, (_made(root / f"offmate-{uuid.uuid4().hex[:8]}", limit) for root, limit in ROOTS)), None)
    if made is None:
        pytest.skip("no control group can be made here")
    yield made
    made.rmdir()


def _made(group: Path, limit: str) -> Path | None:
    """The group; None where this is no place for one: what is made there has no files of the kernel's."""
    try:
        group.mkdir()
        if (group / limit).exists() and (group / "cgroup.procs").exists():
            (group / limit).write_text(str(LIMIT_BYTES))
            for file in (group / "memory.swap.max", group / "memory.swappiness"):
                if file.exists():
                    file.write_text("0")
            return group
    except OSError:
        pass
    with suppress(OSError):
        group.rmdir()
    return None


def watched(group: Path, run: RunFolder, command: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(group), str(run.path), command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_process_that_the_kernel_kills_for_its_memory_is_named_as_such_and_no_other(
    group: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    assert watched(group, run, KILLED) == -9
    assert run.read_error() is None, "somebody else's SIGKILL"
    assert watched(group, run, HOG) == -9
    error = run.read_error()
    assert error is not None
    assert (error["code"], error["what"]) == (
        "killed-for-memory",
        "The kernel killed the trainer: the machine had no memory left.",
    )


def test_the_group_is_asked_before_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, groups, root = tmp_path / "vmstat", tmp_path / "groups", tmp_path / "root"
    machine.write_text("pgfault 3\noom_kill 9\n")
    monkeypatch.setattr(oom, "_VMSTAT", machine)
    monkeypatch.setattr(oom, "_GROUPS", groups)
    monkeypatch.setattr(oom, "_ROOT", root)
    assert oom.kills() == 9, "there are no groups"
    groups.write_text("0::/user.slice/offmate.service\n")
    (root / "user.slice" / "offmate.service").mkdir(parents=True)
    (root / "user.slice" / "offmate.service" / "memory.events").write_text("low 0\nmax 12\noom 2\noom_kill 2\n")
    assert oom.kills() == 2
    groups.write_text("4:cpu,memory:/docker/x\n0::/\n")
    (root / "memory").mkdir()
    (root / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom.kills() == 5, "in a container the group is the root"
    machine.unlink()
    groups.unlink()
    assert oom.kills() == 0


def test_a_process_that_is_to_be_first_says_so() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        oom.be_first(child.pid)
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "500"
    finally:
        child.kill()
        child.wait()
    oom.be_first(child.pid)  # which is gone

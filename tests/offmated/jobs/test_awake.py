"""The machine is kept from sleeping while a job works, and only as long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offmated.jobs.awake import awake
from planner.run.processes import Process
from tests.support.daemons import ROOT, until


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a `systemd-inhibit` writes its process and its words; then it runs what it was given, as the
    real one does where there is a logind."""
    script = tmp_path / "systemd-inhibit"
    file = tmp_path / "held"
    script.write_text(f'#!/bin/sh\necho "$$ $*" > {file}.new; mv {file}.new {file}\nexec cat\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return file


def holder(held: Path) -> Process:
    until(held.exists, "somebody holds sleep off")
    process = Process.of(int(held.read_text().split()[0]))
    assert process is not None
    return process


def test_sleep_is_held_off_in_the_body_and_no_longer(held: Path) -> None:
    with pytest.raises(ZeroDivisionError), awake("job 3 trains"):
        process = holder(held)
        assert held.read_text().split(maxsplit=1)[1] == (
            "--what=sleep:idle:handle-lid-switch --who=offmate --why=job 3 trains --mode=block cat\n"
        )
        raise ZeroDivisionError
    assert not process.alive()


def test_who_is_killed_holds_nothing(held: Path) -> None:
    code = "import time\nfrom offmated.jobs.awake import awake\nwith awake('x'): time.sleep(1000)"
    worker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    process = holder(held)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not process.alive(), "sleep is free again")


def test_where_nobody_can_be_asked_the_body_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = tmp_path / "systemd-inhibit"
    refusing.write_text("#!/bin/sh\nexit 1\n")
    refusing.chmod(0o755)
    done = []
    for path in (str(tmp_path / "empty"), f"{tmp_path}:{os.environ['PATH']}"):
        monkeypatch.setenv("PATH", path)
        with awake("x"):
            done.append(path)
    assert len(done) == 2

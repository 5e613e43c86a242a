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
    """The folder in which each `systemd-inhibit` leaves its words, in a file called as its process; then it runs what
    it was given, as the real one does where there is a logind."""
    folder, script = tmp_path / "held", tmp_path / "systemd-inhibit"
    folder.mkdir()
    script.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/$$; mv {tmp_path}/$$ {folder}\nexec cat\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return folder


def holders(held: Path) -> list[Process]:
    until(lambda: len(list(held.iterdir())) == 2, "idleness and sleep are held off")
    return [process for file in held.iterdir() if (process := Process.of(int(file.name))) is not None]


def test_sleep_is_held_off_in_the_body_and_no_longer(held: Path) -> None:
    with pytest.raises(ZeroDivisionError), awake("job 3 trains"):
        found = holders(held)
        assert sorted(file.read_text() for file in held.iterdir()) == [
            f"--what={what} --who=offmate --why=job 3 trains --mode=block cat\n" for what in ("idle", "sleep")
        ]
        assert len(found) == 2
        raise ZeroDivisionError
    assert not any(process.alive() for process in found)


def test_who_is_killed_holds_nothing(held: Path) -> None:
    code = "import time\nfrom offmated.jobs.awake import awake\nwith awake('x'): time.sleep(1000)"
    worker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    found = holders(held)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    until(lambda: not any(process.alive() for process in found), "sleep is free again")


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

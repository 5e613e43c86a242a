"""Ctrl-C in a terminal in which `offmate plan` works: all its processes get it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from planner.errors import Exit
from tests import ROOT
from tests.support.daemons import PATIENCE_S, until
from tests.support.texts import tiny_llama_folder

# Where the tests themselves run in a shell's background, Ctrl-C is ignored, and would be by their children.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from offmated.command import main
main()
"""


def test_an_interrupted_question_keeps_the_receipt_that_is_there_and_leaves_no_process(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "model")
    words = ["plan", "--model", str(model), "--hardware", "rtx3060", "--max-length", "64"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        env={**os.environ, "OFFMATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    command = psutil.Process(process.pid)

    def has_workers() -> bool:
        assert process.poll() is None, process.communicate()
        with suppress(psutil.Error):
            commands = [" ".join(child.cmdline()) for child in command.children(recursive=True)]
            return sum("spawn_main" in words for words in commands) >= 2
        return False

    until(has_workers, "two of the planner's own processes are there", every_s=0.02)
    everyone = command.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (Exit.INTERRUPTED, "")
    assert "It fits" in said, "the receipt was there before what would help was asked"
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


ASKS = """
import sys
from pathlib import Path
from offmated.cli.planner_process import run_child
from planner.run.ending import leaving_on_signals
with leaving_on_signals():
    run_child([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""
DEAF = """
import signal, subprocess, sys
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
Path(sys.argv[1]).write_text(str(child.pid))
signal.pause()
"""


def test_a_process_that_does_not_end_when_told_is_killed_with_its_own(tmp_path: Path) -> None:
    told = tmp_path / "child"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-c", ASKS, DEAF, str(told)], env=environment, start_new_session=True)
    until(lambda: told.exists() and told.read_text(), "the process has one of its own")
    everyone = psutil.Process(command.pid).children(recursive=True)
    assert len(everyone) == 2
    command.terminate()
    try:
        assert command.wait(60) == 128 + signal.SIGTERM
    finally:
        left = [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        for child in left:
            child.kill()
    assert not left

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


def test_an_interrupted_question_ends_in_silence_and_leaves_no_process(tmp_path: Path) -> None:
    model = tiny_llama_folder(tmp_path / "model")
    words = ["plan", "--model", str(model), "--hardware", "rtx3060", "--max-length", "64"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        env={**os.environ, "OFFMATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
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
    assert (process.returncode, said, errors) == (Exit.INTERRUPTED, "", "")
    assert not [child for child in everyone if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

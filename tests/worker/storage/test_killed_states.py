"""Optimizer states on disk outlive SIGKILL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import ROOT


def test_a_training_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_states", str(tmp_path), "5", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("5 kills") and done.stdout.endswith("the same bits\n"), done.stdout + done.stderr

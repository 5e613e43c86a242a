"""What a job's processes say to their log, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import ROOT

SAYS = """
import logging, resource, sys, warnings
from planner.run.plain_streams import speak_plainly
speak_plainly()
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
"""
EVIL = r"'\x1b]0;x\x07 \r \x9b2J \ud800 ä\t.'"


def said(code: str, log: Path, *, code_expected: int = 0) -> str:
    with log.open("ab") as file:
        command = [sys.executable, "-u", "-c", SAYS + code]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT)
    assert done.returncode == code_expected, log.read_text("utf-8", errors="replace")
    return log.read_bytes().decode("utf-8")


def test_nothing_that_python_says_steers_a_terminal(tmp_path: Path) -> None:
    ways = ("print", "logging.info", "warnings.warn", "sys.stderr.write", "raise OSError")
    code = "; ".join(f"{way}({EVIL})" for way in ways)
    text = said(code, tmp_path / "log", code_expected=1)
    assert text.count("ä\t.") >= 5
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_a_log_whose_disk_is_full_ends_nothing(tmp_path: Path) -> None:
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "for _ in range(9): print('0123456789'); logging.info('0123456789'); sys.stdout.flush()\n"
    )
    assert said(code, tmp_path / "log") == "0123456789\n012345678"

"""What `offmate plan` shows while it works: on a real terminal, and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import LlamaConfig

PATIENCE_S = 180.0
COMMAND = [sys.executable, "-P", "-c", "from offmated.command import main; main()"]
WORDS = [*COMMAND, "plan", "--model", "model", "--hardware", "rtx4090", "--max-length", "64"]


class Terminal:
    """A command on a terminal of its own. `text`: all that it has written so far, without control sequences."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self.text = process, ""
        self._descriptor = descriptor

    def read_until(self, seen: Callable[[str], object]) -> None:
        """Read until `seen(text)` holds, or the command has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not seen(self.text):
            assert time.monotonic() < deadline, self.text
            try:
                read = os.read(self._descriptor, 65536)
            except OSError:  # the other side is closed
                return
            text = read.decode().replace("\r\x1b[2K", "\n")  # a line that gives way to the next one
            self.text += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


@contextmanager
def terminal(folder: Path, words: list[str] = WORDS) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "OFFMATE_HOME": str(folder / "home"), "COLUMNS": "200", "TERM": "xterm"}
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path


def test_a_terminal_shows_what_is_done_then_the_figures_then_what_would_help(folder: Path) -> None:
    with terminal(folder) as shown:
        shown.read_until(lambda text: "It fits: " in text)
        assert shown.text.index("reading the job") < shown.text.index("reading the model") < shown.text.index("It fits")
        assert "would help  " not in shown.text
        shown.read_until(lambda text: False)
        assert shown.process.wait(PATIENCE_S) == 0
    after = shown.text[shown.text.index("It fits: ") :]
    assert "what would help" in after and after.rindex("what would help: ") < after.rindex("would help   larger slices")
    assert after.count("It fits: ") == 1


def test_ctrl_c_keeps_what_is_shown(folder: Path) -> None:
    with terminal(folder) as shown:
        shown.read_until(lambda text: "the running block" in text and "what would help" in text)
        os.kill(shown.process.pid, signal.SIGINT)
        shown.read_until(lambda text: False)
        assert shown.process.wait(PATIENCE_S) in (130, 1, -signal.SIGINT)
    assert "Traceback" not in shown.text and "It fits: " in shown.text


def test_an_error_stands_on_lines_of_its_own(folder: Path) -> None:
    with terminal(folder, [*COMMAND, "plan", "--model", "model", "--hardware", "nope"]) as shown:
        shown.read_until(lambda text: False)
        assert shown.process.wait(PATIENCE_S) == 2
    assert "\nThere is no hardware called nope.\n" in shown.text and shown.text.count("nope.") == 1


def test_a_pipe_gets_the_answer_alone(folder: Path) -> None:
    environment = {**os.environ, "OFFMATE_HOME": str(folder / "home")}
    done = subprocess.run(WORDS, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert "reading the" not in done.stdout and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[1].startswith("It fits: ")
    assert [line.split()[:2] for line in lines if line.startswith("would")] == [["would", "help"]]

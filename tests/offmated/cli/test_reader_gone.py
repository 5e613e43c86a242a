"""Commands whose output nobody reads any more, as in `offmate keys | head -1`: they end, and print no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.texts import CHATML, byte_tokenizer, tiny_llama_folder, write_jsonl

COMMAND = "from offmated.command import main; main()"


def errors_of(folder: Path, *words: str) -> tuple[int, str]:
    """The exit code of the command and what it writes to stderr, where the reader of its stdout has gone before."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OFFMATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", COMMAND, *words],
            cwd=folder,
            env=environment,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["keys"],
        ["keys", "--json"],
        ["--help"],
        ["plan", "--hardware", "list"],
        ["plan", "--hardware", "list", "--json"],
    ],
    ids=" ".join,
)
def test_a_command_ends_quietly(words: list[str], tmp_path: Path) -> None:
    assert errors_of(tmp_path, *words) == (1, "")  # click's exit code for it


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_preview_which_another_process_writes_ends_quietly(form: list[str], tmp_path: Path) -> None:
    tiny_llama_folder(tmp_path / "model", chat_template=CHATML)
    byte_tokenizer(chat_template=CHATML).save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "data.jsonl", [{"text": "some words"}] * 4)
    (tmp_path / "job.yaml").write_text("model: model\ndataset: data.jsonl\nmax_length: 64\ntrain_batch_size: 2\n")
    code, errors = errors_of(tmp_path, "preview", "job.yaml", *form)
    assert code == 0
    assert all(line.startswith("data: ") for line in errors.splitlines()), errors

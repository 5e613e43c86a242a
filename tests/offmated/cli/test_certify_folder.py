"""The passing folders of `certify` and `verify-resume`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offmated.cli.certify import answered, own_folder

KILLED = """
import os, signal, sys
from pathlib import Path
from offmated.cli.certify import own_folder

with own_folder(Path(sys.argv[1])) as folder:
    (Path(folder) / "copy").write_text("of what is trained")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_command_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".certify-mine").mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = set(tmp_path.iterdir()) - {tmp_path / ".certify-mine"}
    assert (left / "copy").is_file(), "nobody could remove it"
    with own_folder(tmp_path) as one:
        assert not left.exists()
        with own_folder(tmp_path) as other:
            assert Path(one).is_dir() and Path(other).is_dir(), "that of a living one stays"
    assert list(tmp_path.iterdir()) == [tmp_path / ".certify-mine"]


def test_the_last_line_of_a_process_is_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('what a library says'); print('{\"equal\": true}'); sys.exit(1)"
    assert answered([sys.executable, "-c", program], True) == 1
    assert json.loads(capsys.readouterr().out) == {"equal": True}
    assert answered([sys.executable, "-c", "import sys; sys.exit(2)"], True) == 2
    assert capsys.readouterr().out == ""

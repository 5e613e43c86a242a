"""State folders of earlier versions, see tests/offmated/jobs/kept/README.md."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from offmated.paths import Paths
from planner.run.processes import Process
from tests import ROOT

FOLDER = ROOT / "tests" / "offmated" / "jobs" / "kept"
VERSIONS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
ELSEWHEN = "00000000-0000-4000-8000-000000000000"  # a boot that was not this one


def lay_out(version: str, which: str, paths: Paths, home: Path, *, this_boot: bool = False) -> None:
    """Write the state folder that `version` left, its database as in `which` ("killed", "down"), its jobs' model and
    data below `home`. `this_boot`: the machine has not been restarted since."""
    words = {
        "{state}": str(paths.state),
        "{home}": str(home),
        "{boot}": Process.current().boot if this_boot else ELSEWHEN,
    }

    def filled(text: str) -> str:
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        return text

    paths.runs.mkdir(parents=True)
    with sqlite3.connect(paths.database) as connection:
        connection.executescript(filled((FOLDER / version / f"{which}.sql").read_text()))
    connection.close()
    for name, text in json.loads((FOLDER / version / "runs.json").read_text()).items():
        path = paths.state / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(filled(text))

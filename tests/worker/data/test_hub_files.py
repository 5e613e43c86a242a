"""Datasets of the hub are read from their files, as those of this machine are; later without the hub, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.support.hub import served

OLD, NEW, NEVER = "a" * 40, "b" * 40, "c" * 40
LINES = b'{"text": "2024-03-05"}\n{"text": "\\"x\\"", "n": 3}\n{"text": "3", "n": [1.0, null]}\n'
RECORDS = [json.loads(line) for line in LINES.splitlines()]
COMMITS = {
    OLD: {"README.md": b"# A set\n", "train.jsonl": LINES, "test.jsonl": b'{"text": "held out"}\n'},
    NEW: {"train.jsonl": b'{"text": "new"}\n'},
}
CARD = b"---\nconfigs:\n- config_name: default\n  data_files: %s\n  %s\n---\n"
READ = """
import json, sys
from planner.errors import UserError
from planner.data.entry import DataEntry
from worker.data.sources import first_of_hub, open_source

for fields in json.loads(sys.argv[1]):
    entry = DataEntry(path="owner/set", **fields)
    try:
        first = first_of_hub(entry, 1)
        rows = [row.record for row in open_source(entry).rows()]
        print(json.dumps([None if first is None else first.rows[0].record, rows]))
    except UserError as error:
        print(json.dumps([error.code, error.numbers[0]]))
"""


def read(home: Path, url: str, *entries: dict[str, str], **environment: str) -> list[Any]:
    """Of each entry the first record that is streamed, and all of them; or the error's code and number."""
    given = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", READ, json.dumps(entries)]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=300, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_records_of_a_commit_are_those_of_its_files_with_the_hub_and_without(tmp_path: Path) -> None:
    part = {"revision": OLD, "split": "train[1:]+test"}
    with served("owner/set", COMMITS) as (url, asked):
        assert read(tmp_path, url, {"revision": OLD}, part, {}) == [
            [RECORDS[0], RECORDS],
            [None, [*RECORDS[1:], {"text": "held out"}]],
            [{"text": "new"}, [{"text": "new"}]],
        ]
        assert any(NEW in path for path in asked)
    found = read(tmp_path, url, {"revision": OLD}, part, {}, {"revision": NEVER}, HF_HUB_OFFLINE="1")
    assert found[0][1] == RECORDS and found[1][1][-1] == {"text": "held out"} and found[2][1] == [{"text": "new"}]
    assert found[3][0] == "hub-offline"


def test_settings_of_a_card_are_honoured_or_refused(tmp_path: Path) -> None:
    commits = {
        OLD: {"README.md": CARD % (b"a.csv", b'sep: ";"'), "a.csv": b'text;n\n007;"a;b"\n'},
        NEW: {"README.md": CARD % (b"a.json", b"field: rows"), "a.json": b'{"rows": [{"text": "a"}]}'},
    }
    with served("owner/set", commits) as (url, _):
        cells, (code, told) = read(tmp_path, url, {"revision": OLD}, {"revision": NEW})
    assert cells == [{"text": "007", "n": "a;b"}, [{"text": "007", "n": "a;b"}]]
    assert code == "dataset-unreadable" and "the dataset's card says field of its json files" in told

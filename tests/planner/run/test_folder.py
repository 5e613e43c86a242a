"""Reading a run folder piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.run import folder
from planner.run.folder import RunFolder


@pytest.mark.parametrize("piece_bytes", [1, 7, 30, 31, 32, 10**6])
def test_events_come_in_pieces_each_once_and_the_half_written_one_later(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PIECE_BYTES", piece_bytes)
    run = RunFolder(tmp_path)
    written = [{"event": "step", "step": step} for step in range(1, 12)]
    lines = "".join(json.dumps(event) + "\n" for event in written)
    run.metrics.write_text(lines + "broken\n" + '{"event": "half')
    told, position = [], 0
    while (found := run.metrics_after(position))[1] != position:
        events, position = found
        told += events
    assert told == written
    assert position == len(lines) + len("broken\n")
    with run.metrics.open("a") as file:
        file.write(' written"}\n')
    assert run.metrics_after(position) == ([{"event": "half written"}], run.metrics.stat().st_size)


def test_nothing_comes_after_the_end_of_a_file(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.metrics_after(7) == ([], 7)
    run.metrics.write_text('{"event": "start"}\n')
    for position in (19, 20, 10**18, 10**30):
        assert run.metrics_after(position) == ([], position)

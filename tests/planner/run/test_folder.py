"""Reading a run folder piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.run import folder
from planner.run.events import Piece
from planner.run.folder import RunFolder


@pytest.mark.parametrize("piece_bytes", [1, 7, 30, 31, 32, 10**6])
def test_events_come_in_pieces_each_once_and_the_half_written_one_later(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PIECE_BYTES", piece_bytes)
    run = RunFolder(tmp_path)
    written = [{"event": "step", "step": step} for step in range(1, 12)]
    lines = "".join(json.dumps(event) + "\n" for event in written)
    run.metrics.write_text(lines + "broken\n" + '{"event": "half written", "st')
    told, position = [], 0
    count, broken = 0, []
    while (found := run.metrics_after(position)).position != position:
        position = found.position
        told += found.events
        broken += [count + number for number in found.broken]
        count += found.lines
    assert told == written
    assert (count, broken) == (12, [12])
    assert position == len(lines) + len("broken\n")
    with run.metrics.open("a") as file:
        file.write('ep": 12}\n')
    events, end = [{"event": "half written", "step": 12}], run.metrics.stat().st_size
    assert run.metrics_after(position) == Piece(events=events, position=end, lines=1)


def test_nothing_comes_after_the_end_of_a_file(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.metrics_after(7) == Piece(events=[], position=7)
    run.metrics.write_text('{"event": "start"}\n')
    for position in (19, 20, 10**18, 10**30):
        assert run.metrics_after(position) == Piece(events=[], position=position)


def test_a_checkpoint_that_a_run_was_given_is_none_that_it_saved(tmp_path: Path) -> None:
    """Whether there is room for a run's own is to be looked at before its first hours."""
    run = RunFolder(tmp_path)
    (run.checkpoints / "step-7").mkdir(parents=True)
    assert run.has_saved()
    run.goes_on.touch()
    assert not run.has_saved()
    run.metrics.touch()
    assert run.has_saved()


def test_two_processes_that_ask_first_have_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, write, other = RunFolder(tmp_path), folder._write_text, list[str]()

    def slow(path: Path, text: str) -> None:
        monkeypatch.setattr(folder, "_write_text", write)
        other.append(run.token())
        write(path, text)

    monkeypatch.setattr(folder, "_write_text", slow)
    assert [run.token()] == other
    assert [path.name for path in tmp_path.iterdir()] == ["token"]

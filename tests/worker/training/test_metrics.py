"""metrics.jsonl: appended line by line, readable after any crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.run.folder import RunFolder
from planner.run.step_times import step_times
from worker.training.metrics import Metrics, read_metrics, steps_trained, tell_broken_lines


def write(path: Path, *events: tuple[str, int], resumed_from: int | None = None) -> None:
    with Metrics(path) as metrics:
        for event, step in events:
            start = {"resumed_from": resumed_from, "total_steps": 9} if event == "start" else {}
            metrics.write(event, step=step, **start)


def series(path: Path) -> list[tuple[object, object]]:
    return [(event["event"], event["step"]) for event in read_metrics(path)]


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.write("step", step=1, loss=2.5, grad_norm=None)
        (event,) = read_metrics(tmp_path / "m.jsonl")
    assert event.pop("time")
    assert event == {"event": "step", "step": 1, "loss": 2.5, "grad_norm": None}


def test_a_torn_last_line_is_not_read_and_the_next_writer_cuts_it_off(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("start", 0), ("step", 1))
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    assert series(path) == [("start", 0), ("step", 1)]
    write(path, ("step", 2))
    assert series(path) == [("start", 0), ("step", 1), ("step", 2)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_resume_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3))
    write(path, ("start", 2), ("step", 3), ("step", 4), resumed_from=2)
    assert series(path) == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("checkpoint", 2),
        ("start", 2),
        ("step", 3),
        ("step", 4),
    ]


def test_a_start_without_a_checkpoint_takes_back_everything(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, ("start", 0), ("step", 1), ("step", 2))
    write(path, ("start", 0), ("step", 1))
    assert series(path) == [("start", 0), ("start", 0), ("step", 1)]


def test_numbers_json_cannot_hold_become_null(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.write("step", step=1, loss=float("nan"), grad_norm=float("inf"))
    (event,) = read_metrics(tmp_path / "m.jsonl")
    assert (event["loss"], event["grad_norm"]) == (None, None)


NOISE = [
    b"nonsense",
    b"\0" * 4096,
    b"[1]",
    b"null",
    b'"event"',
    b'{"event": "step"}',
    b'{"event": "step", "step": NaN}',
    b'{"event": "step", "step": "2"}',
    b'{"event": "step", "step": true}',
    b'{"event": "step", "step": -1}',
    b'{"event": 3, "step": 2}',
    b'{"step": 2}',
    b'{"event": "start", "step": 0}',
    b'{"event": "sample", "step": 2}',
    b'{"event": "step", "step": 2, "loss": "low"}',
    b'{"event": "step", "step": 2, "loss": [1]}',
    b"[" * 100_000,
    '{"event": "step", "step": 2, "text": "\u00fc"}'.encode("latin-1"),
    b'{"event": "step", "step": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("noise", NOISE, ids=lambda noise: repr(noise[:40]))
def test_a_line_that_is_no_event_is_passed_over_and_said(
    tmp_path: Path, noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, ("start", 0), ("step", 1))
    with path.open("ab") as file:
        file.write(noise + b"\n")
    write(path, ("step", 2))
    assert series(path) == [("start", 0), ("step", 1), ("step", 2)]
    assert RunFolder(tmp_path).read_metrics() == read_metrics(path)
    assert step_times(read_metrics(path)).steps == 2
    tell_broken_lines(RunFolder(tmp_path))
    assert "metrics.jsonl: line 3 is no event, and passed over" in caplog.text


def test_numbers_that_are_none_are_null_however_they_are_written(tmp_path: Path) -> None:
    line = '{"event": "step", "step": 1, "loss": NaN, "grad_norm": -Infinity, "step_s": 1e999, "tokens": 4}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    (event,) = read_metrics(tmp_path / "metrics.jsonl")
    assert event == {"event": "step", "step": 1, "loss": None, "grad_norm": None, "step_s": None, "tokens": 4}


def test_steps_that_are_repeated_take_those_before_back_where_the_line_of_the_resume_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, ("start", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("eval", 3))
    with path.open("ab") as file:
        file.write(b"\0" * 90 + b"\n")
    write(path, ("step", 3), ("eval", 3), ("step", 4))
    assert series(path) == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("eval", 2),
        ("step", 3),
        ("eval", 3),
        ("step", 4),
    ]


def test_no_file_is_an_empty_series(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_the_steps_trained_are_those_that_no_later_start_takes_back(tmp_path: Path) -> None:
    assert steps_trained([]) == 0
    write(tmp_path / "m.jsonl", ("start", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3))
    assert steps_trained(read_metrics(tmp_path / "m.jsonl")) == 3
    write(tmp_path / "m.jsonl", ("start", 2), resumed_from=2)
    assert steps_trained(read_metrics(tmp_path / "m.jsonl")) == 2

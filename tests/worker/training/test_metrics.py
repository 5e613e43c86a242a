"""metrics.jsonl: appended line by line, readable after any crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.training.metrics import Metrics, read_metrics, steps_trained


def write(path: Path, *events: tuple[str, int], resumed_from: int | None = None) -> None:
    with Metrics(path) as metrics:
        for event, step in events:
            metrics.write(event, step=step, **({"resumed_from": resumed_from} if event == "start" else {}))


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
        ("start", 0), ("step", 1), ("step", 2), ("checkpoint", 2), ("start", 2), ("step", 3), ("step", 4),
    ]  # fmt: skip


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


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"event": "start", "step": 0}\nnonsense\n')
    with pytest.raises(ValueError, match=r"m\.jsonl line 2 is not JSON"):
        read_metrics(tmp_path / "m.jsonl")


def test_no_file_is_an_empty_series(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_the_steps_trained_are_those_that_no_later_start_takes_back(tmp_path: Path) -> None:
    assert steps_trained([]) == 0
    write(tmp_path / "m.jsonl", ("start", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3))
    assert steps_trained(read_metrics(tmp_path / "m.jsonl")) == 3
    write(tmp_path / "m.jsonl", ("start", 2), resumed_from=2)
    assert steps_trained(read_metrics(tmp_path / "m.jsonl")) == 2

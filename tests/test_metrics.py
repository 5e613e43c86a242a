"""metrics.jsonl: appended line by line, readable after any crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.metrics import Event, Metrics, free_step_s, measured, read_metrics


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


def test_the_first_two_steps_after_a_start_do_not_count_for_the_median(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        for resumed, times in ((None, (9.0, 8.0, 1.0, 2.0, 3.0)), (5, (7.0, 6.0, 4.0))):
            metrics.write("start", step=resumed or 0, resumed_from=resumed)
            for step, step_s in enumerate(times, start=1 + (resumed or 0)):
                metrics.write("step", step=step, step_s=step_s, gpu_peak_bytes=int(10 * step_s) if step < 3 else None)
    assert measured(read_metrics(path)) == (2.5, 90)


def steps_of(path: Path, *steps: tuple[float, bool]) -> list[Event]:
    """A run's events with these step times, metered or not."""
    with Metrics(path) as metrics:
        metrics.write("start", step=0, resumed_from=None)
        for step, (step_s, metered) in enumerate(steps, start=1):
            metrics.write("step", step=step, step_s=step_s, gpu_peak_bytes=None, metered=metered)
    return read_metrics(path)


def test_metered_steps_do_not_count_for_the_median(tmp_path: Path) -> None:
    cold, metered, free = [(9.0, True)] * 2, [(5.0, True)] * 9, [(2.0, False), (1.0, False), (1.5, False)]
    assert measured(steps_of(tmp_path / "m.jsonl", *cold, *metered, *free))[0] == 1.5


def test_metered_steps_are_better_than_none(tmp_path: Path) -> None:
    events = steps_of(tmp_path / "m.jsonl", (9.0, True), (9.0, True), (5.0, True), (4.0, True))
    assert measured(events)[0] == 4.5
    assert free_step_s(events) is None


def test_few_steps_are_better_than_none(tmp_path: Path) -> None:
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.write("start", step=0, resumed_from=None)
        assert measured(read_metrics(tmp_path / "m.jsonl")) == (None, None)
        metrics.write("step", step=1, step_s=0.5, gpu_peak_bytes=None)
    assert measured(read_metrics(tmp_path / "m.jsonl")) == (0.5, None)

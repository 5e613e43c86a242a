"""What the API says of a job beside its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offmated.models import JobRow
from offmated.states import JobState, StopReason
from offmated.views import job_view


def row(number: int, state: JobState, run_dir: Path = Path("/nowhere"), **values: Any) -> JobRow:
    return JobRow(
        id=number, name="job", state=state, priority=values.pop("priority", 0), run_dir=str(run_dir), **values
    )


def reason(job: JobRow, *others: JobRow) -> str:
    return str(job_view(job, [job, *others])["reason"])


def test_a_job_says_what_it_waits_for() -> None:
    job, first, later = row(3, JobState.WAITING), row(2, JobState.WAITING), row(4, JobState.WAITING)
    running, urgent = row(1, JobState.RUNNING), row(9, JobState.WAITING, priority=5)
    assert reason(job, later) == "goes to the GPU next"
    assert reason(job, running, later) == "waits for job 1"
    assert reason(job, first, later) == "waits for the GPU, 1 before it"
    assert reason(job, running, first, urgent) == "waits for the GPU, 3 before it"
    assert reason(row(5, JobState.SUBMITTED), row(4, JobState.PLANNING), running) == "waits for job 4"


def test_a_job_that_is_being_stopped_says_why() -> None:
    assert reason(row(1, JobState.RUNNING)) == ""
    assert reason(row(1, JobState.RUNNING, stop_reason=StopReason.CANCEL)) == "is being cancelled"
    assert reason(row(1, JobState.RUNNING, stop_reason=StopReason.SHUTDOWN)) == "saves a checkpoint to stop"


def test_a_job_before_its_first_plan_has_no_figures() -> None:
    view = job_view(row(1, JobState.SUBMITTED), [])
    nothing = {"step_s": None, "gpu_peak_bytes": None}
    assert (view["plan"], view["progress"], view["predicted"], view["measured"]) == (None, None, nothing, nothing)


def step(number: int, step_s: float, peak: int | None) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 9.0 - number, "step_s": step_s, "gpu_peak_bytes": peak}


def test_time_left_is_the_median_step_times_the_steps_left(tmp_path: Path) -> None:
    start = {"event": "start", "step": 0, "total_steps": 13}
    events = [start, step(1, 9.0, 100), step(2, 2.0, None), step(3, 2.0, 90)]
    half_written = '{"event": "st'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + half_written)
    view = job_view(row(1, JobState.RUNNING, tmp_path), [])
    assert view["progress"] == {"step": 3, "total_steps": 13, "loss": 6.0, "step_s": 2.0, "eta_s": 20.0}
    assert view["measured"] == {"step_s": 2.0, "gpu_peak_bytes": 100}


def test_a_long_metrics_file_is_read_at_its_ends_only(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "total_steps": 10_000}, *(step(n, 1.0, n) for n in range(1, 5001))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    view = job_view(row(1, JobState.RUNNING, tmp_path), [])
    assert (view["progress"]["step"], view["progress"]["total_steps"]) == (5000, 10_000)


def test_new_events_are_seen(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"event": "start", "step": 0, "total_steps": 2}) + "\n")
    job = row(1, JobState.RUNNING, tmp_path)
    assert job_view(job, [])["progress"]["step"] == 0
    with metrics.open("a") as file:
        file.write(json.dumps(step(1, 1.0, 1)) + "\n")
    assert job_view(job, [])["progress"]["step"] == 1

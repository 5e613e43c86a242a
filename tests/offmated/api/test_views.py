"""What the API says of a job beside its row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offmated.api.views import job_view
from offmated.cli.follow import is_rehearsed
from offmated.jobs.listing import Listed
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.table import JobRow
from offmated.version import API
from planner.hub import not_reached
from planner.run.folder import RunFolder
from planner.run.processes import Process


def row(number: int, state: JobState, run_dir: Path = Path("/nowhere"), **values: Any) -> JobRow:
    return JobRow(
        id=number,
        name="job",
        state=state,
        priority=values.pop("priority", 0),
        run_dir=str(run_dir),
        **{"history": [], "attempts": 0, **values},
    )


def view(job: JobRow) -> dict[str, Any]:
    return job_view(Listed(row=job))


def reason(job: JobRow) -> str:
    return str(view(job)["reason"])


def test_what_a_job_is_shown_with_and_the_number_of_the_api_change_together() -> None:
    """By the number a command finds that a daemon of before has no such field: raise it, then change this."""
    fields = (
        "after_id attempts begin_at crashes created_at ended_at error exit_code expected history hold id kept label"
        " last_checkpoint_step measured name notes output place plan predicted priority progress reason run_dir"
        " settings standing started_at state stop_reason window"
    )
    assert (API, sorted(view(row(1, JobState.SUBMITTED)))) == (16, fields.split())


def test_a_job_that_is_being_stopped_says_why() -> None:
    assert reason(row(1, JobState.RUNNING)) == ""
    assert reason(row(1, JobState.RUNNING, stop_reason=StopReason.CANCEL)) == "is being cancelled"
    assert reason(row(1, JobState.RUNNING, stop_reason=StopReason.SHUTDOWN)) == "saves a checkpoint to stop"


def test_a_job_at_work_does_not_show_the_error_that_it_has_got_past() -> None:
    error = not_reached("the model a/b", TimeoutError()).to_json()
    me = str(Process.current())
    for state, words in ((JobState.PLANNING, "asks the hub again"), (JobState.RUNNING, "")):
        shown = view(row(1, state, error=error, owner=me))
        assert (shown["error"], shown["reason"]) == (None, words)


def test_a_job_whose_process_is_gone_is_not_shown_as_running() -> None:
    """The database has not taken it yet: its disk may be full."""
    gone = str(Process(pid=2**22 + 1, started=1, boot="another"))
    for state, due in ((JobState.RUNNING, "waiting"), (JobState.PLANNING, "submitted")):
        shown = view(row(1, state, owner=gone))
        assert shown["state"] == due
        assert shown["reason"] == "its process has ended; it goes on once the database has taken that"
        assert view(row(1, state, owner=str(Process.current())))["state"] == state


@pytest.mark.parametrize("owner", ["", "12", "a:b:c", "12:13:14:15"])
def test_an_owner_that_is_none_is_nobody(owner: str) -> None:
    shown = view(row(1, JobState.RUNNING, owner=owner))
    assert shown["state"] == "waiting"
    assert shown["reason"] == "its process has ended; it goes on once the database has taken that"


def test_a_job_in_a_later_attempt_says_from_where_and_why(tmp_path: Path) -> None:
    killed = {"number": 1, "from_step": None, "ended_at": 2.0, "ending": "the trainer was killed by SIGKILL (signal 9)"}
    now = {"number": 2, "from_step": 40, "ended_at": None, "metrics_from": 0}
    waiting = row(1, JobState.WAITING, history=[killed], attempts=1, last_checkpoint_step=40)
    running = row(1, JobState.RUNNING, tmp_path, history=[killed, now], attempts=2, last_checkpoint_step=40)
    (tmp_path / "metrics.jsonl").write_text('{"event": "start", "step": 40, "total_steps": 90}\n')
    words = f"attempt 2, from step 40; before: {killed['ending']}"
    assert reason(waiting) == f"goes to the GPU next; {words}"
    assert reason(running) == words
    assert reason(row(1, JobState.RUNNING, history=[now], attempts=1)) == ""


def test_a_job_whose_trainer_was_killed_is_shown_as_being_resumed_until_that_has_loaded(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "total_steps": 90}, *(step(n, 1.0, 1) for n in range(1, 48))]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(lines + '{"event": "st')  # torn
    killed = {"number": 1, "from_step": None, "ended_at": 2.0, "ending": "the trainer was killed"}
    for origin, words, at in (
        (40, "is being resumed; attempt 2, from step 40", 40),
        (None, "begins again; attempt 2, from the start", 0),
    ):
        now = {"number": 2, "from_step": origin, "ended_at": None, "metrics_from": len(lines)}
        shown = view(row(1, JobState.RUNNING, tmp_path, history=[killed, now], attempts=2))
        progress = shown["progress"]
        assert shown["reason"] == f"{words}; before: the trainer was killed"
        assert (progress["step"], progress["loss"], progress["eta_s"], progress["total_steps"]) == (at, None, None, 90)
    metrics.write_text(f'{lines}{{"event": "start", "step": 40, "total_steps": 90}}\n')
    now = {"number": 2, "from_step": 40, "ended_at": None, "metrics_from": len(lines)}
    shown = view(row(1, JobState.RUNNING, tmp_path, history=[killed, now], attempts=2))
    assert shown["reason"] == "attempt 2, from step 40; before: the trainer was killed"
    damaged = row(1, JobState.RUNNING, tmp_path, history=[killed, now | {"metrics_from": "?"}], attempts=2)
    assert reason(damaged) == shown["reason"]


def test_progress_is_that_of_the_attempt_that_runs(tmp_path: Path) -> None:
    start = {"event": "start", "step": 0, "total_steps": 9}
    events = [start, *(step(n, 1.0, 1) for n in range(1, 6)), start | {"step": 2, "resumed_from": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    progress = view(row(1, JobState.RUNNING, tmp_path))["progress"]
    assert (progress["step"], progress["loss"], progress["eta_s"]) == (2, None, None)


def test_a_job_before_its_first_plan_has_no_figures() -> None:
    shown = view(row(1, JobState.SUBMITTED))
    nothing = {"step_s": None, "gpu_peak_bytes": None}
    assert (shown["plan"], shown["progress"], shown["predicted"]) == (None, None, nothing)
    assert shown["measured"] == nothing | {"steps": 0}


def step(number: int, step_s: float, peak: int | None) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 9.0 - number, "step_s": step_s, "gpu_peak_bytes": peak}


def test_time_left_is_the_median_step_times_the_steps_left(tmp_path: Path) -> None:
    start = {"event": "start", "step": 0, "total_steps": 13}
    events = [start, step(1, 9.0, 100), step(2, 2.0, None), step(3, 2.0, 90)]
    half_written = '{"event": "st'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + half_written)
    shown = view(row(1, JobState.RUNNING, tmp_path))
    assert shown["progress"] == {
        "step": 3,
        "total_steps": 13,
        "loss": 6.0,
        "eval_loss": None,
        "step_s": 2.0,
        "eta_s": 20.0,
    }
    assert shown["measured"] == {"step_s": 2.0, "steps": 1, "gpu_peak_bytes": 100}


def test_a_long_metrics_file_is_read_at_its_ends_only(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "total_steps": 10_000}, *(step(n, 1.0, n) for n in range(1, 5001))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    shown = view(row(1, JobState.RUNNING, tmp_path))
    assert (shown["progress"]["step"], shown["progress"]["total_steps"]) == (5000, 10_000)


def test_the_largest_peak_is_that_of_the_run_whose_first_steps_alone_are_metered(tmp_path: Path) -> None:
    events = [{"event": "start", "step": 0, "total_steps": 10_000}, *(step(n, 1.0, n) for n in range(1, 3001))]
    for event in events[1:]:
        event["gpu_peak_bytes"] = 700 if event["step"] == 2 else None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert view(row(1, JobState.RUNNING, tmp_path))["measured"]["gpu_peak_bytes"] == 700


@pytest.mark.parametrize("at", [1, 2500, 4999])
def test_the_last_evaluation_is_found_wherever_it_is(tmp_path: Path, at: int) -> None:
    events: list[dict[str, Any]] = [{"event": "start", "step": 0, "total_steps": 10_000}]
    for number in range(1, 5001):
        events.append(step(number, 1.0, 1))
        if number in (1, at):
            events.append({"event": "eval", "step": number, "eval_loss": number / 2})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    progress = view(row(1, JobState.RUNNING, tmp_path))["progress"]
    assert (progress["step"], progress["eval_loss"]) == (5000, at / 2)


def test_new_events_are_seen(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(json.dumps({"event": "start", "step": 0, "total_steps": 2}) + "\n")
    job = row(1, JobState.RUNNING, tmp_path)
    assert view(job)["progress"]["step"] == 0
    with metrics.open("a") as file:
        file.write(json.dumps(step(1, 1.0, 1)) + "\n")
    assert view(job)["progress"]["step"] == 1


def test_broken_lines_of_metrics_are_passed_over(tmp_path: Path) -> None:
    start = json.dumps({"event": "start", "step": 0, "total_steps": 13})
    lines = [start, "\x00\x00", "[1]", '{"st', json.dumps(step(1, 2.0, 100))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert view(row(1, JobState.RUNNING, tmp_path))["progress"]["step"] == 1
    assert [event["event"] for event in RunFolder(tmp_path).read_metrics()] == ["start", "step"]


@pytest.mark.parametrize("name", ["plan.json", "metrics.jsonl"])
@pytest.mark.parametrize("text", ["", "no json\n", "[]\n", '{"event": "start"}\n', '{"plan": {}, "measured": true}\n'])
def test_a_file_that_holds_something_else_hides_only_its_own_figures(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    shown = view(row(1, JobState.RUNNING, tmp_path))
    assert (shown["id"], shown["plan"], shown["progress"]) == (1, None, None)


@pytest.mark.parametrize("text", ["", "[]", '{"other": 1}'])
def test_a_broken_error_file_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "error.json").write_text(text)
    assert RunFolder(tmp_path).read_error() is None


def test_figures_of_preferences_are_those_of_the_last_step_and_evaluation(tmp_path: Path) -> None:
    margins = {"rewards_margins": 0.5, "rewards_accuracies": 0.75}
    events = [
        {"event": "reference", "step": 0, "rows": 9, "seconds": 3.0},
        {"event": "start", "step": 0, "total_steps": 5000},
        *(step(n, 1.0, 1) | {"rewards_chosen": 2.0} for n in range(1, 1001)),
        {"event": "eval", "step": 1000, "eval_loss": 1.0, "eval_rewards_margins": 0.25},
        step(1001, 1.0, 1) | margins,
    ]
    write = (tmp_path / "metrics.jsonl").write_text
    write("".join(json.dumps(event) + "\n" for event in events))
    progress = view(row(1, JobState.RUNNING, tmp_path))["progress"]
    usual = {"step", "total_steps", "loss", "eval_loss", "step_s", "eta_s"}
    assert {name: value for name, value in progress.items() if name not in usual} == margins | {
        "eval_rewards_margins": 0.25
    }
    assert progress["total_steps"] == 5000, "the start is not the first event of such a job"
    write("".join(json.dumps(event) + "\n" for event in events[:1]))
    assert view(row(1, JobState.RUNNING, tmp_path))["progress"] is None


def test_a_job_whose_reference_scores_its_answers_says_how_far_it_is(tmp_path: Path) -> None:
    now = {"number": 1, "from_step": None, "ended_at": None, "metrics_from": 0}
    begun = row(1, JobState.RUNNING, tmp_path, history=[now], attempts=1)
    log = tmp_path / "log.txt"
    log.write_text("12:00:00 data: 900 pairs\n")
    assert reason(begun) == ""
    with log.open("a") as lines:
        lines.write("12:00:10 reference: 120 of 900 rows, 4 min left\n12:00:11 evaluation: no room\n")
    assert reason(begun) == "reference: 120 of 900 rows, 4 min left"
    assert is_rehearsed(view(begun)), "a submission would wait for hours"
    (tmp_path / "metrics.jsonl").write_text('{"event": "reference", "step": 0, "rows": 900, "seconds": 300.0}\n')
    assert reason(begun) == ""
    assert not is_rehearsed(view(begun))
    log.write_text("12:00:10 reference: 120 of 900 rows, 4 min left\n[offmate] 2026-01-01 12:01:00 tried again\n")
    (tmp_path / "metrics.jsonl").unlink()
    assert reason(begun) == "", "that was the attempt before"

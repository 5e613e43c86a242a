"""Jobs with hours of their own, by a clock of the test's: what is due, what is stopped, what is told."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import cast
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import update

from offmated.api.views import job_view
from offmated.cli import job_view as words
from offmated.jobs import listing, queue_changes
from offmated.jobs.figures import _PLAN_FIELDS, left_s, stop_s
from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_turns import AT_ONCE, Turn
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.submission import submit
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from offmated.service.broker import Broker
from offmated.service.dispatcher import Dispatcher
from planner.errors import Exit, UserError
from planner.run.folder import RunFolder
from planner.run.processes import Process
from worker.training.metrics import Metrics

ME = Process.current()
BERLIN = "Europe/Berlin"
JOB = "model: ./model\ndataset: text.jsonl\nmax_steps: 100\n"
STEP_S, SAVE_S = 60.0, 30.0


class Night:
    """A store, a dispatcher whose messages go nowhere, and the clock on the wall."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.home = folder
        patch.setattr(time, "time", lambda: self.now)
        self.set("2026-06-10 22:00")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model" / "tokenizer.json").write_text("{}")
        (folder / "text.jsonl").write_text('{"text": "one"}\n')
        self.paths = Paths(state=folder / "state", runtime=Path("/tmp/unused-by-these-tests"))
        self.paths.runs.mkdir(parents=True)
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)
        self.sent: list[int] = []
        self.dispatcher = Dispatcher(self.store, Broker(url="redis://localhost:1/0", command=None, prefix="x"))
        patch.setattr(self.dispatcher, "_send", lambda name, row: self.sent.append(row.id))

    def set(self, text: str) -> None:
        self.now = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(BERLIN)).timestamp()

    def clock(self, unix: float | None) -> str:
        assert unix is not None
        return datetime.fromtimestamp(unix, ZoneInfo(BERLIN)).strftime("%Y-%m-%d %H:%M")

    def submit(self, lines: str = "", turn: Turn = AT_ONCE, window: str | None = None) -> int:
        """A job, planned: 100 steps of a minute each."""
        row, _ = submit(self.store, self.paths, JOB + lines, self.home, turn=turn, window=window)
        taken = self.store.take(row.id, JobState.PLANNING, ME)
        assert taken is not None
        plan = dict.fromkeys(
            (
                "slices",
                "rounds",
                "clip",
                "source",
                "lp_step_s",
                "bound_s",
                "solver_gap",
                "gpu_peak_bytes",
                "gpu_budget_bytes",
                "cpu_budget_bytes",
            )
        )
        document = {
            "plan": {**plan, "options": [], "step_s": STEP_S, "cpu_peak_bytes": 4e8 * SAVE_S},
            "measured": True,
            "cached": False,
            "solve_s": 0.0,
        }
        (Path(row.run_dir) / "plan.json").write_text(json.dumps(document))
        self.store.end(taken, 0)
        return row.id

    def handed_out(self) -> list[int]:
        """Whom the GPU worker is sent now."""
        self.sent.clear()
        self.dispatcher.hand_out()
        return self.sent

    def begin(self, number: int, steps: int = 0) -> JobRow:
        """Have the job work, and do some steps."""
        row = self.store.take(number, JobState.RUNNING, ME)
        assert row is not None
        with Metrics(RunFolder(Path(row.run_dir)).metrics) as metrics:
            metrics.write("start", step=0, total_steps=100)
            for step in range(1, steps + 1):
                self.now += STEP_S
                metrics.write("step", step=step, loss=1.0, step_s=STEP_S)
        return row

    def tick(self, number: int) -> JobRow:
        self.dispatcher.keep_windows()
        return self.store.job(number)

    def view(self, number: int) -> dict[str, object]:
        return job_view(listing.one(self.store, number))


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    return Night(tmp_path, monkeypatch)


def test_a_job_waits_for_its_window_and_says_when_and_until_when(night: Night) -> None:
    number = night.submit(f"schedule: {{window: '23:00-07:00', timezone: {BERLIN}}}\n")
    assert night.handed_out() == []
    view = night.view(number)
    assert view["window"] == f"23:00-07:00 {BERLIN}"
    assert str(view["reason"]).startswith("begins at ")
    found = cast(dict[str, float], view["expected"])
    assert (night.clock(found["starts_at"]), night.clock(found["ends_at"])) == ("2026-06-10 23:00", "2026-06-11 00:40")
    assert words.expected(view) == words.wall(found["ends_at"])
    night.set("2026-06-10 23:00")
    assert night.handed_out() == [number]


def test_a_job_saves_before_its_window_ends_and_goes_on_the_next_night(night: Night) -> None:
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n")
    night.set("2026-06-11 06:00")
    row = night.begin(number, steps=5)
    assert night.tick(number).stop_reason is None
    night.set("2026-06-11 06:57")
    assert night.tick(number).stop_reason is None, "a step and a save have room, and some more"
    night.set("2026-06-11 06:58:10")
    assert night.tick(number).stop_reason is StopReason.WINDOW
    (Path(row.run_dir) / "checkpoints" / "step-5").mkdir(parents=True)
    night.store.end(row, Exit.STOPPED)
    after = night.store.job(number)
    assert (after.state, after.crashes, after.hold) == (JobState.WAITING, 0, None)
    assert after.history[-1]["ending"] == "saved before its window's end"
    assert night.clock(after.begin_at) == "2026-06-11 23:00"
    other = night.submit()
    assert night.handed_out() == [other], "others have the GPU by day"
    night.store.stop(other, StopReason.CANCEL)
    night.set("2026-06-11 23:00")
    assert night.handed_out() == [number]


def test_a_window_that_has_passed_without_a_turn_is_not_taken_for_the_next_day(night: Night) -> None:
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n")
    night.set("2026-06-11 12:00")
    assert night.handed_out() == []
    assert night.clock(night.store.job(number).begin_at) == "2026-06-11 23:00"


def test_a_job_is_not_begun_for_less_than_a_step_and_a_save(night: Night) -> None:
    number, other = night.submit("schedule: 23:00-07:00 Europe/Berlin\n"), night.submit()
    night.set("2026-06-11 06:59")
    assert night.handed_out() == [other]
    assert night.clock(night.store.job(number).begin_at) == "2026-06-11 23:00"


def test_a_machine_that_slept_through_the_end_of_a_window_stops_the_job_when_it_wakes(night: Night) -> None:
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n")
    night.set("2026-06-11 01:00")
    night.begin(number)
    night.set("2026-06-11 09:00")
    assert night.tick(number).stop_reason is StopReason.WINDOW


@pytest.mark.parametrize("text", ["{}", '{"plan": []}', '{"plan": {}, "measured": true}', None])
def test_a_job_whose_plan_cannot_be_read_keeps_no_other_from_the_gpu(night: Night, text: str | None) -> None:
    broken, other = night.submit("schedule: 23:00-07:00 Europe/Berlin\n"), night.submit()
    night.set("2026-06-11 01:00")
    plan = night.paths.run_folder(broken) / "plan.json"
    if text is None:
        plan.unlink()
        plan.mkdir()
    else:
        plan.write_text(text)
    assert night.handed_out() == [broken], "whoever takes it finds out, and it fails"
    night.begin(broken)
    assert night.tick(broken).stop_reason is None
    night.set("2026-06-11 07:00")
    assert night.tick(broken).stop_reason is StopReason.WINDOW, "it leaves the GPU in the morning all the same"
    assert [job.row.id for job in listing.queue(night.store, limit=9).jobs] == [broken, other]


def test_a_window_that_is_none_any_more_fails_its_job_alone(night: Night) -> None:
    lost, runs, other = (night.submit("schedule: 21:00-07:00 Europe/Berlin\n") for _ in range(3))
    night.begin(runs)
    with night.store.writing() as session:
        session.execute(update(JobRow).where(JobRow.id != other).values(window="21:00-07:00 Atlantis/Poseidon"))
    assert [job.row.id for job in listing.queue(night.store, limit=9).jobs] == [runs, lost, other]
    assert night.tick(runs).stop_reason is None
    night.store.end(night.store.job(runs), 0)
    assert night.handed_out() == [other]
    row = night.store.job(lost)
    assert (row.state, (row.error or {})["code"]) == (JobState.FAILED, "job-not-handled")
    assert '"Atlantis/Poseidon" is no time zone' in str(row.error)


@pytest.mark.parametrize(
    ("evening", "still", "over", "tonight"),
    [
        ("2026-03-28 23:30", "2026-03-29 06:50", "2026-03-29 06:59", "2026-03-29 23:00"),
        ("2026-10-24 23:30", "2026-10-25 06:50", "2026-10-25 06:59", "2026-10-25 23:00"),
    ],
)
def test_on_nights_when_clocks_are_set_the_window_ends_by_the_clock(
    night: Night, evening: str, still: str, over: str, tonight: str
) -> None:
    night.set(evening)
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n")
    night.begin(number)
    night.set(still)
    assert night.tick(number).stop_reason is None
    night.set(over)
    assert night.tick(number).stop_reason is StopReason.WINDOW
    assert night.clock(night.store.job(number).begin_at) == tonight


def test_a_job_of_many_hours_says_over_how_many_nights(night: Night) -> None:
    number = night.submit("schedule: 23:00-00:00 Europe/Berlin\n")  # 100 minutes of work, nearly an hour a night
    assert words.expected(night.view(number)).endswith(", 2 nights")


def test_a_window_that_is_too_short_for_a_step_and_a_save_is_named_with_both_numbers(night: Night) -> None:
    number = night.submit("schedule: 23:00-23:02 Europe/Berlin\n")
    for now in ("2026-06-10 22:00", "2026-06-10 23:00", "2026-06-11 12:00"):
        night.set(now)
        assert night.handed_out() == []
        assert night.view(number)["reason"] == (
            "its window 23:00-23:02 Europe/Berlin has 2 min, and a step and a save take up to 3 min: it never "
            f"begins; offmate release {number} leaves the window out"
        )
    queue_changes.release(night.store, number)
    assert night.handed_out() == [number]
    fits = night.submit("schedule: 23:00-23:04 Europe/Berlin\n")
    assert str(night.view(fits)["reason"]).startswith("begins at ")


def test_a_job_whose_end_is_unknown_does_not_say_twice_when_it_begins(night: Night) -> None:
    number = night.submit(f"schedule: 23:00-07:00 {BERLIN}\n")
    (Path(night.store.job(number).run_dir) / "plan.json").unlink()
    view = night.view(number)
    assert view["reason"] == f"waits for its window 23:00-07:00 {BERLIN}"
    found = cast(dict[str, float], view["expected"])
    assert night.clock(found["starts_at"]) == "2026-06-10 23:00" and found["ends_at"] is None
    assert words.expected(view) == f"begins {words.wall(found['starts_at'])}"


def test_the_machines_window_is_for_jobs_that_name_none_and_a_release_is_for_now(night: Night) -> None:
    machines, own = f"01:00-05:00 {BERLIN}", f"23:00-07:00 {BERLIN}"
    plain = night.submit(window=machines)
    said = night.submit(turn=Turn(window=own), window=machines)
    assert [night.store.job(number).window for number in (plain, said)] == [machines, own]
    assert night.handed_out() == []
    queue_changes.release(night.store, plain)
    assert (night.store.job(plain).window, night.handed_out()) == (None, [plain])


def test_a_later_begin_is_kept_and_one_outside_the_window_waits_for_it(night: Night) -> None:
    late = night.now + 36 * 3600  # 10:00 in the morning after the next
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n", Turn(begin_at=late))
    assert night.clock(night.store.job(number).begin_at) == "2026-06-12 23:00"


def test_what_is_no_window_is_refused_at_submission(night: Night) -> None:
    with pytest.raises(UserError) as caught:
        night.submit("schedule: at night\n")
    assert (caught.value.exit_code, "is not like 23:00-07:00" in str(caught.value)) == (Exit.USAGE, True)
    with pytest.raises(UserError) as caught:
        night.submit(turn=Turn(window="at night"))
    assert caught.value.code == "bad-window"
    assert night.store.jobs() == [] and list(night.paths.runs.iterdir()) == []


def test_what_is_known_of_a_runs_pace_is_what_its_steps_show(night: Night) -> None:
    number = night.submit("schedule: 23:00-07:00 Europe/Berlin\n")
    night.set("2026-06-10 23:00")
    row = night.begin(number, steps=4)
    run = RunFolder(Path(row.run_dir))
    with Metrics(run.metrics) as metrics:
        night.now += 600  # an evaluation
        metrics.write("eval", step=4, eval_loss=1.0)
        night.now += 100
        metrics.write("checkpoint", step=4, path="x")
        night.now += STEP_S
        metrics.write("step", step=5, loss=1.0, step_s=STEP_S)
    assert left_s(run) == 95 * STEP_S
    assert stop_s(run) == pytest.approx(1.1 * (600 + STEP_S + 100) + 15)


def test_no_end_is_forecast_for_a_job_whose_reference_has_not_scored_its_answers(tmp_path: Path) -> None:
    for preference, left in (("null", 40.0), ("orpo", 40.0), ("dpo", None)):
        run = RunFolder(tmp_path / preference)
        run.path.mkdir()
        run.resolved.write_text(f"max_steps: 20\npreference: {preference}\n")
        with Metrics(run.metrics) as metrics:
            metrics.write("reference", step=0, rows=9, seconds=3.0)
            plan = {**dict.fromkeys(_PLAN_FIELDS), "options": [], "step_s": 2.0}
            run.write_plan({"plan": plan, "measured": True, "cached": False, "solve_s": 0.0})
            assert left_s(run) == left
            metrics.write("start", step=0, total_steps=20)
        assert left_s(run) == 40.0

"""A clock that is set while a job runs: what happened is told in its order all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.run.folder import RunFolder
from planner.run.processes import Process
from worker.training.metrics import Metrics, read_metrics

ME = Process.current()
DAY_S = 86400.0
SETS = pytest.mark.parametrize("set_by_s", [-DAY_S, DAY_S, 0.0])


class House:
    """A store with one job that waits for the GPU, and the clock on its wall."""

    def __init__(self, paths: Paths, patch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        patch.setattr(time, "time", self._time)
        paths.runs.mkdir(parents=True)
        self.store = Store(f"sqlite:///{paths.database}")
        upgrade(self.store.engine, paths)
        self.run = RunFolder(paths.run_folder(1))
        self.store.add("job", lambda _: self.run.path.mkdir() or self.run.path)  # type: ignore[func-returns-value]
        row = self.store.take(1, JobState.PLANNING, ME)
        assert row is not None
        self.store.end(row, 0)

    def _time(self) -> float:
        self.now += 0.001
        return self.now

    def take(self) -> JobRow:
        row = self.store.take(1, JobState.RUNNING, ME)
        assert row is not None
        return row

    def train(self, first: int, last: int, *, set_by_s: float = 0.0, status: str | None = None) -> None:
        """The events of a trainer; in the middle of its steps the clock is set."""
        with Metrics(self.run.metrics) as metrics:
            metrics.write("start", step=first, total_steps=40, resumed_from=first or None)
            for step in range(first + 1, last + 1):
                self.now += set_by_s if step == (first + last) // 2 else 0.0
                metrics.write("step", step=step, loss=1.0)
            if status is not None:
                metrics.write("end", step=last, status=status, output="/out" if status == "done" else None)

    @property
    def job(self) -> JobRow:
        return self.store.job(1)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    return House(Paths.at(tmp_path / "state"), monkeypatch)


@SETS
def test_a_job_has_its_result_and_its_steps(house: House, set_by_s: float) -> None:
    row = house.take()
    house.train(0, 40, set_by_s=set_by_s, status="done")
    assert house.store.end(row, 0) is JobState.DONE
    job, (attempt,) = house.job, house.job.history
    assert job.result is not None
    assert (job.result["output"], job.result["step"], attempt["reached_step"]) == ("/out", 40, 40)
    assert job.created_at <= job.started_at <= attempt["ended_at"] <= job.ended_at


@SETS
def test_every_attempt_has_its_own_events_and_begins_after_the_one_before(house: House, set_by_s: float) -> None:
    row = house.take()
    house.train(0, 9, set_by_s=set_by_s, status="stopped")
    with house.run.metrics.open("a") as file:
        file.write('{"event": "step", "st')  # it was killed in the middle of a line, a long one
        file.write("." * 300)
    (house.run.checkpoints / "step-8").mkdir(parents=True)
    assert house.store.end(row, -9) is JobState.WAITING
    house.now += set_by_s
    row = house.take()
    house.train(8, 8, status="failed")
    assert house.store.end(row, 1) is JobState.FAILED
    house.store.retry(1, JobState.WAITING)
    house.now += set_by_s
    row = house.take()  # which ends before it has written anything
    assert house.store.end(row, 1) is JobState.FAILED
    first, second, third = house.job.history
    assert [attempt["reached_step"] for attempt in (first, second, third)] == [9, None, None]
    assert house.job.result is None, "the one before had a result"
    times = [attempt[name] for attempt in (first, second, third) for name in ("started_at", "ended_at")]
    assert times == sorted(times)
    assert house.job.ended_at == times[-1]
    assert [event["step"] for event in read_metrics(house.run.metrics) if event["event"] == "end"] == [8]


@SETS
def test_a_long_run_has_its_result(house: House, set_by_s: float) -> None:
    row = house.take()
    house.train(0, 900, set_by_s=set_by_s, status="done")
    assert house.run.metrics.stat().st_size > 3 * 16 * 1024
    house.store.end(row, 0)
    assert house.job.result is not None and house.job.history[0]["reached_step"] == 900


@SETS
def test_a_job_that_is_cancelled_while_it_waits_ends_after_it_began(house: House, set_by_s: float) -> None:
    house.store.end(house.take(), 75)
    house.now += set_by_s
    assert house.store.stop(1, StopReason.CANCEL) is JobState.CANCELLED
    assert house.job.created_at <= house.job.started_at <= house.job.ended_at

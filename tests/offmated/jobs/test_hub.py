"""Jobs that do not reach the hub: they wait for it without a turn, in a real database."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offmated.api.views import job_view
from offmated.jobs import listing, queue_changes
from offmated.jobs.queue_forecast import UNKNOWN
from offmated.jobs.states import TAKEN_FROM, Hold, JobState, StopReason
from offmated.jobs.store import Store
from planner.hub import NOT_REACHED, not_reached
from planner.run.folder import RunFolder
from tests.offmated.jobs.test_queue_changes import ME, Line


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def in_vain(line: Line, number: int, phase: JobState = JobState.PLANNING) -> float:
    """Have a job ask the hub, which is not reached; returns the pause until it asks again."""
    row = line.store.take(number, phase, ME)
    assert row is not None
    RunFolder(line.paths.run_folder(number)).write_error(not_reached("the config of owner/model", TimeoutError()))
    line.store.end(row, 1)
    error = line.store.job(number).error
    assert error is not None and error["code"] == NOT_REACHED
    return float(error["again"]["at"] - time.time())


def ask_again(line: Line, number: int, monkeypatch: pytest.MonkeyPatch, later_s: float) -> None:
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr("offmated.jobs.again.time.time", lambda: now + later_s)
        assert queue_changes.go_on(line.store) == [number]


@pytest.mark.parametrize("phase", [JobState.PLANNING, JobState.RUNNING])
def test_a_job_that_does_not_reach_the_hub_steps_aside_and_asks_again_later_and_later(
    line: Line, monkeypatch: pytest.MonkeyPatch, phase: JobState
) -> None:
    number = line.add() if phase is JobState.PLANNING else line.planned()
    for pause_s in (60, 120, 240, 480, 900, 900):
        assert in_vain(line, number, phase) == pytest.approx(pause_s, abs=1)
        row = line.store.job(number)
        assert (row.state, row.hold, row.crashes) == (TAKEN_FROM[phase], Hold.NO_HUB, 0)
        assert list(line.store.due(phase, 9)) == [] == queue_changes.go_on(line.store)
        found = listing.one(line.store, number)
        assert re.match(r"waits for the hub; tried again at \d\d:\d\d", job_view(found)["reason"])
        assert found.expected == UNKNOWN
        ask_again(line, number, monkeypatch, pause_s + 1)
        assert [row.id for row in line.store.due(phase, 9)] == [number]
        assert listing.one(line.store, number).expected == UNKNOWN


def test_who_got_past_the_hub_waits_for_it_as_at_first_the_next_time(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = line.add()
    for _ in range(3):
        in_vain(line, number)
        ask_again(line, number, monkeypatch, 1000)
    row = line.store.take(number, JobState.PLANNING, ME)
    assert row is not None
    shown = job_view(listing.one(line.store, number))
    assert (shown["reason"], shown["error"]) == ("asks the hub again", None)
    assert line.store.end(row, 0) is JobState.WAITING
    assert line.store.job(number).error is None
    assert in_vain(line, number, JobState.RUNNING) == pytest.approx(60, abs=1)


def test_a_clock_that_is_set_back_has_the_hub_asked_at_once(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    number = line.add()
    in_vain(line, number)
    ask_again(line, number, monkeypatch, -86400)


@pytest.mark.parametrize("change", [queue_changes.pause, queue_changes.hold])
def test_a_person_keeps_a_job_that_waits_for_the_hub_and_may_have_it_asked_at_once(
    line: Line, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store, int], None]
) -> None:
    number = line.add()
    in_vain(line, number)
    change(line.store, number)
    assert line.store.job(number).hold is (Hold.PAUSED if change is queue_changes.pause else Hold.HELD)
    with monkeypatch.context() as patch:
        patch.setattr("offmated.jobs.again.time.time", lambda: 1e10)
        assert queue_changes.go_on(line.store) == []
    queue_changes.resume(line.store, number)
    in_vain(line, number)
    queue_changes.resume(line.store, number)
    assert [row.id for row in line.store.due(JobState.PLANNING, 9)] == [number]


def test_a_job_that_is_paused_while_it_asks_the_hub_stays_so(line: Line) -> None:
    number = line.add()
    row = line.store.take(number, JobState.PLANNING, ME)
    assert row is not None
    queue_changes.pause(line.store, number)
    RunFolder(line.paths.run_folder(number)).write_error(not_reached("it", TimeoutError()))
    line.store.end(row, 1)
    assert line.store.job(number).hold is Hold.PAUSED


def test_a_pause_that_comes_as_its_try_ends_stays(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    number = line.add()
    row = line.store.take(number, JobState.PLANNING, ME)
    assert row is not None
    RunFolder(line.paths.run_folder(number)).write_error(not_reached("it", TimeoutError()))
    write, pauses = line.store._write, iter([partial(queue_changes.pause, line.store, number)])

    def paused_before(*args: Any) -> bool:
        for pause in pauses:
            pause()
        return write(*args)

    monkeypatch.setattr(line.store, "_write", paused_before)
    line.store.end(row, 1)
    assert line.store.job(number).hold is Hold.PAUSED


def test_a_job_that_is_cancelled_while_it_waits_for_the_hub_ended_for_no_other_reason(line: Line) -> None:
    number = line.add()
    in_vain(line, number)
    line.store.stop(number, StopReason.CANCEL)
    row = line.store.job(number)
    assert (row.state, row.error) == (JobState.CANCELLED, None)

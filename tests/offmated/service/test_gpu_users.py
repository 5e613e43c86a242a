"""Jobs that leave the GPU to other programs: readings, one after the other, and what becomes of jobs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offmated.api.views import job_view
from offmated.jobs import listing, queue_changes
from offmated.jobs.migrate import upgrade
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from offmated.paths import Paths
from offmated.service import gpu_users
from offmated.service.broker import Broker
from offmated.service.dispatcher import Dispatcher
from offmated.service.gpu_users import MANY_BYTES, User, Watcher, Yielding, idle_seconds, others, own_processes
from planner.errors import Exit, UserError
from planner.run.processes import Process

ME = Process.current()
IDLE_S = 600.0


def feed(yielding: Yielding, *readings: tuple[float, bool]) -> list[bool]:
    """What it says after each reading: at a second, whether somebody was there."""
    return [yielding.take(at, ("game",) if there else ()) for at, there in readings]


def test_jobs_yield_to_who_is_seen_twice_and_go_on_after_a_long_quiet() -> None:
    readings = ((0, False), (5, True), (10, True), (15, True), (20, False), (619, False), (620, False))
    said = feed(Yielding(IDLE_S), *readings)
    assert said == [False, False, True, True, True, True, False]


def test_who_looks_in_for_a_moment_wants_nothing() -> None:
    assert not any(feed(Yielding(IDLE_S), (0, True), (5, False), (10, True), (15, False), (20, False)))


def test_each_return_begins_the_quiet_anew() -> None:
    readings = ((0, True), (5, True), (10, False), (600, True), (605, False), (1204, False), (1205, False))
    said = feed(Yielding(IDLE_S), *readings)
    assert said == [False, True, True, True, True, True, False]


def test_a_daemon_that_starts_while_jobs_yield_waits_for_the_quiet() -> None:
    assert feed(Yielding(IDLE_S, yields=True), (100, False), (699, False), (700, False)) == [True, True, False]


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is none of the daemon's."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child.pid
    child.kill()
    child.wait()


@pytest.mark.parametrize(
    ("computes", "used", "wants"),
    [
        (True, 2**20, True),
        (True, None, True),
        (False, MANY_BYTES, True),
        (False, MANY_BYTES - 1, False),
        (False, None, False),
    ],
)
def test_programs_that_compute_or_take_much_memory_want_the_gpu_and_a_desktop_does_not(
    computes: bool, used: int | None, wants: bool, stranger: int
) -> None:
    user = User(pid=stranger, computes=computes, used_bytes=used)
    assert bool(others([user], {os.getpid()})) is wants
    assert stranger in own_processes(), "a child of this process is one of its own"
    assert others([user], own_processes()) == ()
    assert others([User(pid=2**22 + 1, computes=True, used_bytes=None)], ()) == (f"process {2**22 + 1}",)


def test_a_job_leaves_the_gpu_when_another_program_comes_and_goes_on_when_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(state=tmp_path, runtime=Path("/tmp/unused-by-these-tests"))
    paths.runs.mkdir()
    store = Store(f"sqlite:///{paths.database}")
    upgrade(store.engine, paths)
    dispatcher = Dispatcher(store, Broker(url="redis://localhost:1/0", command=None, prefix="x"))
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr(dispatcher, "_send", lambda name, row: sent.append((name, row.id)))
    for _ in range(2):
        store.add("job", lambda number: paths.run_folder(number).mkdir() or paths.run_folder(number))  # type: ignore[func-returns-value]
    planned = store.take(1, JobState.PLANNING, ME)
    assert planned is not None
    store.end(planned, 0)
    row = store.take(1, JobState.RUNNING, ME)
    assert row is not None

    there: list[User] = []
    watcher = Watcher(Yielding(IDLE_S), lambda names: queue_changes.leave_gpu(store, bool(names)), lambda: tuple(there))

    def look(at: float) -> None:
        watcher.tick(at)
        dispatcher.keep_paused()
        sent.clear()
        dispatcher.hand_out()

    look(0)
    there.append(User(pid=1, computes=True, used_bytes=2**30))
    look(5)
    assert store.job(1).stop_reason is None
    look(7)  # too early for another reading
    assert store.job(1).stop_reason is None
    look(10)
    assert store.job(1).stop_reason is StopReason.YIELD
    store.end(row, Exit.STOPPED)
    assert store.job(1).history[-1]["ending"] == "left the GPU to another program"
    look(15)
    assert sent == [("plan", 2)], "plans are made meanwhile"
    view: dict[str, Any] = job_view(listing.one(store, 1))
    assert str(view["reason"]).startswith("another program uses the GPU")
    there.clear()
    look(20)
    look(619)
    assert ("gpu", 1) not in sent
    look(625)
    assert ("gpu", 1) in sent


def test_a_driver_that_does_not_answer_changes_nothing() -> None:
    said: list[tuple[str, ...]] = []

    def broken() -> tuple[User, ...]:
        raise RuntimeError("Driver Not Loaded")

    watcher = Watcher(Yielding(IDLE_S, yields=True), said.append, broken)
    with pytest.raises(RuntimeError):
        watcher.tick(0)
    watcher.tick(1)  # not at once again
    assert said == []


def test_nvml_answers_here_or_says_why_not() -> None:
    try:
        assert all(user.pid > 0 for user in gpu_users.read_users())
    except RuntimeError as error:
        assert str(error)


@pytest.mark.parametrize("minutes", ["soon", "-1", "1441", "nan"])
def test_a_setting_that_is_no_time_is_refused(minutes: str) -> None:
    with pytest.raises(UserError) as caught:
        idle_seconds(minutes)
    assert (caught.value.code, caught.value.exit_code) == ("bad-config", Exit.USAGE)


def test_without_nvml_the_setting_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert idle_seconds("10") == IDLE_S
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        idle_seconds("10")
    assert "pip install 'offmate[yield]'" in str(caught.value)

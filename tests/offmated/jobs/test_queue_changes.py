"""What people do to the queue, in a real database: which job has its turn next, and what each says it waits for."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offmated.api.views import job_view
from offmated.jobs import listing, queue_changes
from offmated.jobs.migrate import upgrade
from offmated.jobs.queue_turns import AT_ONCE, Turn
from offmated.jobs.states import FINAL, Hold, JobState, StopReason
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.disk import check_space
from planner.errors import Exit, Room, UserError, disk_full
from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.disks import small_disk

ME = Process.current()


class Line:
    """A store, and the names of jobs in the order in which they have their turns on the GPU."""

    def __init__(self, folder: Path, *, runs: Path | None = None) -> None:
        """`runs`: another folder for the run folders."""
        self.paths = Paths(state=folder / "state", runtime=Path("/tmp/unused-by-these-tests"))
        self.paths.runs.parent.mkdir(parents=True)
        if runs is not None:
            self.paths.runs.symlink_to(runs)
        (runs or self.paths.runs).mkdir()
        self.store = Store(f"sqlite:///{self.paths.database}")
        upgrade(self.store.engine, self.paths)

    def add(self, turn: Turn = AT_ONCE) -> int:
        """A job that is due for the planner."""

        def folder(number: int) -> Path:
            path = (
                self.paths.runs.readlink() / str(number)
                if self.paths.runs.is_symlink()
                else (self.paths.run_folder(number))
            )
            path.mkdir()
            return path

        return self.store.add("job", folder, turn).id

    def planned(self, turn: Turn = AT_ONCE) -> int:
        """A job that waits for the GPU."""
        number = self.add(turn)
        row = self.store.take(number, JobState.PLANNING, ME)
        assert row is not None
        self.store.end(row, 0)
        return number

    def later(self, number: int, seconds: float) -> None:
        """Let the time when a job is tried again be so much sooner."""
        with self.store.writing() as session:
            row = session.get_one(JobRow, number)
            assert row.error is not None
            again = row.error["again"]
            row.error = {**row.error, "again": {**again, "at": again["at"] - seconds}}

    def run(self, number: int, exit_code: int | None = None) -> None:
        """Begin a job; with an exit code end it, too."""
        row = self.store.take(number, JobState.RUNNING, ME)
        assert row is not None
        if exit_code is not None:
            self.store.end(row, exit_code)

    def due(self) -> list[int]:
        """Who has the GPU next, in order."""
        return [row.id for row in self.store.due(JobState.RUNNING, 99)]

    def reason(self, number: int) -> str:
        """Why a job waits."""
        return str(job_view(listing.one(self.store, number))["reason"])


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


def test_jobs_have_their_turns_by_priority_and_then_as_they_came(line: Line) -> None:
    numbers = [line.planned(Turn(priority=priority)) for priority in (0, 5, -1, 5)]
    assert line.due() == [numbers[1], numbers[3], numbers[0], numbers[2]]
    queue_changes.set_priority(line.store, numbers[2], 9)
    assert line.due()[0] == numbers[2]


@pytest.mark.parametrize(
    ("move", "order"),
    [
        (lambda store: queue_changes.move_first(store, 4), [4, 1, 2, 3, 5]),
        (lambda store: queue_changes.move_first(store, 1), [1, 2, 3, 4, 5]),
        (lambda store: queue_changes.move_last(store, 2), [1, 3, 4, 5, 2]),
        (lambda store: queue_changes.move_before(store, 5, 2), [1, 5, 2, 3, 4]),
        (lambda store: queue_changes.move_before(store, 2, 5), [1, 3, 4, 2, 5]),
        (lambda store: queue_changes.move_before(store, 2, 2), [1, 2, 3, 4, 5]),
    ],
)
def test_a_job_is_moved_and_the_others_keep_their_order(
    line: Line, move: Callable[[Store], None], order: list[int]
) -> None:
    for _ in range(5):
        line.planned()
    move(line.store)
    assert line.due() == order
    assert [job.row.id for job in listing.queue(line.store, limit=9).jobs] == order
    assert line.planned() == 6
    assert line.due() == [*order, 6], "who comes later comes last"


def test_many_moves_in_a_row_are_what_a_list_would_do(line: Line) -> None:
    order = [line.planned(Turn(priority=number // 3)) for number in range(9)]
    order.sort(key=lambda number: (-((number - 1) // 3), number))
    for step in range(40):
        number, other = order[(7 * step + 3) % 9], order[(5 * step) % 9]
        if number == other:
            continue
        queue_changes.move_before(line.store, number, other)
        order.remove(number)
        order.insert(order.index(other), number)
        assert line.due() == order


def test_a_job_moved_before_another_has_its_priority(line: Line) -> None:
    low, high = line.planned(), line.planned(Turn(priority=3))
    queue_changes.move_before(line.store, low, high)
    assert line.due() == [low, high]
    assert line.store.job(low).priority == 3


def test_what_is_held_has_no_turn_by_planner_or_gpu_until_it_is_released(line: Line) -> None:
    held, waiting, other = line.add(Turn(held=True)), line.planned(), line.planned()
    assert line.store.due(JobState.PLANNING, 9) == []
    assert line.store.take(held, JobState.PLANNING, ME) is None, "nor where a message for it was on its way"
    queue_changes.hold(line.store, waiting)
    queue_changes.hold(line.store, waiting)
    assert line.due() == [other]
    assert line.store.take(waiting, JobState.RUNNING, ME) is None
    assert line.reason(waiting) == f"held: offmate release {waiting}"
    assert line.reason(other) == "goes to the GPU next", "who is held is not before anybody"
    for number in (held, waiting):
        queue_changes.release(line.store, number)
    assert line.due() == [waiting, other]
    assert [row.id for row in line.store.due(JobState.PLANNING, 9)] == [held]


def test_a_job_comes_after_another_that_is_done(line: Line) -> None:
    first = line.planned()
    second = line.planned(Turn(after=first, priority=9))
    assert line.due() == [first]
    assert line.reason(second) == f"begins after job {first}, which is waiting"
    line.run(first)
    assert line.reason(second) == f"begins after job {first}, which is running"
    row = line.store.job(first)
    line.store.end(row, 0)
    assert line.due() == [second]
    assert line.reason(second) == "goes to the GPU next"


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (None, "cancelled")])
def test_a_job_after_one_that_did_not_end_well_says_what_to_do(line: Line, code: int | None, state: str) -> None:
    first = line.planned()
    second = line.planned(Turn(after=first))
    line.run(first, code) if code is not None else line.store.stop(first, StopReason.CANCEL)
    assert line.due() == []
    assert line.reason(second) == f"job {first} is {state}: offmate retry {first}, or offmate release {second}"
    queue_changes.release(line.store, second)
    assert line.due() == [second]


def test_a_job_cannot_come_after_one_that_is_not_there(line: Line) -> None:
    with pytest.raises(UserError) as caught:
        line.add(Turn(after=7))
    assert (caught.value.code, caught.value.exit_code) == ("no-such-job", Exit.NO_SUCH_JOB)
    assert line.store.jobs() == []


def test_a_job_begins_when_its_time_has_come(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    at = time.mktime((2026, 12, 24, 18, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: at - 60)
    number = line.planned(Turn(begin_at=at))
    assert line.due() == []
    assert line.store.take(number, JobState.RUNNING, ME) is None
    assert line.reason(number) == "waits for its time", "what is expected says when it begins"
    monkeypatch.setattr(time, "time", lambda: at)
    assert line.due() == [number]
    assert line.reason(number) == "goes to the GPU next"


def test_a_running_job_that_is_paused_waits_with_its_hold_and_goes_on_when_resumed(line: Line) -> None:
    number = line.planned()
    line.run(number)
    queue_changes.pause(line.store, number)
    line.store.stop(number, StopReason.PAUSE)
    assert line.reason(number) == "saves a checkpoint to pause"
    row = line.store.job(number)
    assert line.store.end(row, 75) is JobState.WAITING
    assert (line.store.job(number).history[-1]["ending"], line.store.job(number).crashes) == ("paused", 0)
    assert line.due() == []
    assert line.reason(number).startswith(f"paused: offmate resume {number}; attempt 2")
    queue_changes.resume(line.store, number)
    assert line.due() == [number]


def test_a_pause_is_no_cancel_and_does_not_soften_one(line: Line) -> None:
    number = line.planned()
    line.run(number)
    line.store.stop(number, StopReason.CANCEL)
    line.store.stop(number, StopReason.PAUSE)
    assert line.store.end(line.store.job(number), -15) is JobState.CANCELLED


def test_a_job_that_finishes_as_it_is_paused_is_done(line: Line) -> None:
    number = line.planned()
    line.run(number)
    queue_changes.pause(line.store, number)
    line.store.stop(number, StopReason.PAUSE)
    assert line.store.end(line.store.job(number), 0) is JobState.DONE
    assert line.reason(number) == ""


def test_a_job_that_waits_is_paused_until_it_is_resumed_and_a_retry_takes_every_hold_back(line: Line) -> None:
    number = line.planned()
    queue_changes.pause(line.store, number)
    assert line.store.job(number).hold is Hold.PAUSED
    assert line.reason(number) == f"paused: offmate resume {number}"
    assert line.due() == []
    line.store.stop(number, StopReason.CANCEL)
    line.store.retry(number, JobState.WAITING)
    assert line.due() == [number]


def test_a_paused_machine_says_so_and_forgets_nothing(line: Line) -> None:
    number = line.planned()
    for _ in range(2):
        queue_changes.pause_all(line.store)
        assert queue_changes.is_paused(line.store)
    assert line.reason(number) == "the machine is paused: offmate resume"
    for _ in range(2):
        queue_changes.resume_all(line.store)
        assert not queue_changes.is_paused(line.store)
    assert line.reason(number) == "goes to the GPU next"


@pytest.mark.parametrize(
    "change",
    [queue_changes.hold, queue_changes.release, queue_changes.pause, queue_changes.resume, queue_changes.move_first],
)
def test_a_job_that_is_over_or_not_there_has_no_turn_to_change(
    line: Line, change: Callable[[Store, int], None]
) -> None:
    number = line.add()
    line.store.stop(number, StopReason.CANCEL)
    with pytest.raises(UserError) as caught:
        change(line.store, number)
    assert (caught.value.code, caught.value.exit_code) == ("job-ended", Exit.USAGE)
    with pytest.raises(UserError) as caught:
        change(line.store, number + 1)
    assert caught.value.code == "no-such-job"
    assert line.store.job(number).state in FINAL


def test_what_cannot_be_changed_is_said_with_what_can(line: Line) -> None:
    number, running = line.planned(), line.planned()
    line.run(running)
    for change, at, code, hint in (
        (queue_changes.hold, running, "job-begun", f"offmate pause {running} has it save a checkpoint and wait"),
        (queue_changes.move_last, running, "job-begun", "its place matters again when it waits"),
        (queue_changes.release, number, "not-held", f"offmate move {number} --first"),
        (queue_changes.resume, number, "not-paused", f"offmate show {number}"),
    ):
        with pytest.raises(UserError) as caught:
            change(line.store, at)
        assert (caught.value.code, caught.value.hint, caught.value.exit_code) == (code, hint, Exit.USAGE)


def test_a_job_without_room_says_what_is_missing_and_goes_on_once_it_is_there(line: Line) -> None:
    number = line.planned()
    with small_disk(2**20) as disk:
        ballast = disk / "somebody's"
        ballast.write_bytes(bytes(3 * 2**18))
        line.run(number)
        run = RunFolder(line.paths.run_folder(number))
        with pytest.raises(UserError) as caught:
            check_space(disk, 2**19, "the checkpoint of step 3")
        run.write_error(caught.value)
        row = line.store.job(number)
        assert line.store.end(row, 1) is JobState.WAITING
        assert line.due() == queue_changes.go_on(line.store) == []
        assert line.reason(number).startswith(f"waiting for room: 256.0 KiB missing at {disk}; goes on by itself")
        ballast.unlink()
        assert line.reason(number).startswith("there is room again: it goes on")
        assert queue_changes.go_on(line.store) == [number]
    assert line.due() == [number]
    line.run(number, 0)
    assert (line.store.job(number).state, line.store.job(number).error) == (JobState.DONE, None)


def test_a_full_disk_that_nobody_measured_asks_for_more_than_it_has_or_is_tried_by_the_clock(line: Line) -> None:
    number = line.planned()
    for pause_s in (60, 120, 240):
        line.run(number, Exit.NO_ROOM_TO_SAY)
        error = line.store.job(number).error
        assert error is not None
        assert error["needs"]["folder"] == str(line.paths.run_folder(number))
        assert error["needs"]["bytes"] > shutil.disk_usage(line.paths.runs).free
        assert error["again"]["pause_s"] == pause_s
        assert queue_changes.go_on(line.store) == []
        assert re.search(r"missing at .*; goes on by itself, tried again at \d\d:\d\d", line.reason(number))
        line.later(number, pause_s + 1)
        assert queue_changes.go_on(line.store) == [number]


def test_a_job_that_a_version_without_a_clock_had_wait_for_room_is_tried_by_the_clock(line: Line) -> None:
    number = line.planned()
    line.run(number, Exit.NO_ROOM_TO_SAY)
    with line.store.writing() as session:  # as that version guessed it: more than this disk will ever have
        row = session.get_one(JobRow, number)
        assert row.error is not None
        error = {name: value for name, value in row.error.items() if name != "again"}
        row.error = error | {"needs": {"folder": row.run_dir, "bytes": 2**60}}
    assert line.reason(number).startswith("no room is seen yet; trying again now")
    assert queue_changes.go_on(line.store) == [number]
    line.run(number, Exit.NO_ROOM_TO_SAY)
    assert queue_changes.go_on(line.store) == [], "from now on it has its clock"
    line.later(number, 61)
    assert queue_changes.go_on(line.store) == [number]


def test_files_that_a_disk_has_no_more_of_are_waited_for_and_no_bytes(tmp_path: Path) -> None:
    with small_disk(2**24, "nr_inodes=200") as disk:
        line = Line(tmp_path, runs=disk / "runs")
        number = line.planned()
        others = disk / "others"
        others.mkdir()
        with pytest.raises(OSError, match="No space left"):
            for name in range(1000):
                (others / str(name)).touch()
        line.run(number)
        assert shutil.disk_usage(disk).free > 2**23
        assert line.store.end(line.store.job(number), Exit.NO_ROOM_TO_SAY) is JobState.WAITING
        error = line.store.job(number).error
        assert error is not None and error["needs"] == {"folder": f"{disk}/runs/{number}", "bytes": 0, "files": 10}
        assert line.due() == queue_changes.go_on(line.store) == []
        missing = f"10 files missing at {disk}/runs/{number}"
        assert line.reason(number).startswith(f"waiting for room: {missing}; goes on by itself")
        for name in range(12):
            (others / str(name)).unlink()
        assert line.reason(number).startswith("there is room again: it goes on")
        assert queue_changes.go_on(line.store) == [number]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_a_quota_which_no_disk_shows_is_tried_again_by_the_clock_alone(line: Line, number: int) -> None:
    job = line.planned()
    run = RunFolder(line.paths.run_folder(job))
    refused = OSError(number, os.strerror(number), f"{run.path}/checkpoints/new")
    for pause_s in (60, 120):
        line.run(job)
        run.write_error(disk_full(refused, "the checkpoint"))
        assert line.store.end(line.store.job(job), 1) is JobState.WAITING
        assert queue_changes.go_on(line.store) == [] == line.due()
        told = rf"waiting for room: \[Errno {number}\] .*; goes on by itself, tried again at"
        assert re.match(told, line.reason(job))
        line.later(job, pause_s + 1)
        assert queue_changes.go_on(line.store) == [job]


def test_room_that_is_there_although_it_was_not_enough_is_not_tried_at_once(line: Line) -> None:
    job = line.planned()
    run = RunFolder(line.paths.run_folder(job))
    line.run(job)
    needs = Room(str(run.path), 1)
    run.write_error(UserError("no room", code="disk-full", needs=needs))
    line.store.end(line.store.job(job), 1)
    assert queue_changes.go_on(line.store) == [] == line.due()
    line.later(job, 61)
    assert queue_changes.go_on(line.store) == [job]


def test_a_job_that_is_being_planned_has_a_place_too_and_may_be_given_another(line: Line) -> None:
    first, second = line.planned(), line.planned()
    third = line.add()
    taken = line.store.take(third, JobState.PLANNING, ME)
    assert taken is not None
    queue_changes.move_first(line.store, third)
    line.store.end(taken, 0)
    assert [job.row.id for job in listing.queue(line.store, limit=9).jobs] == [third, first, second]


def test_what_ended_last_comes_first_whatever_its_number(line: Line) -> None:
    first, second = line.planned(), line.planned()
    line.run(second, 0)
    line.run(first, 0)
    found = listing.newest(line.store, tuple(FINAL), limit=1, by_end=True)
    assert ([job.row.id for job in found.jobs], found.following, found.total) == ([first], None, 2)

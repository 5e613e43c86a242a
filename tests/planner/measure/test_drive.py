"""How much of a drive a job's optimizer states may take."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.job.room import with_drive
from planner.job.schema import Job
from planner.measure import drive
from planner.measure.drive import with_own_drive, with_rates
from tests.support.chains import HARDWARE
from tests.support.runs import make_run

GB = 10**9


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("job")
    found, _ = make_run(folder, "llama", disk_paths=(str(folder / "a"), str(folder / "b")), save_total_limit=2)
    return found


def test_without_a_folder_nothing_may_be_on_disk(job: Job) -> None:
    for asked in (with_drive, with_own_drive):
        assert asked(job.model_copy(update={"disk_paths": None}), HARDWARE) is HARDWARE


@pytest.mark.parametrize(
    ("keys", "room"),
    [
        ({}, 98 * GB),  # what is free but for a little, two folders on one disk
        ({"disk_budget": 30 * GB}, 30 * GB),
        ({"disk_budget": 300 * GB}, 98 * GB),
        ({"disk_budget": 30 * GB, "save_total_limit": 1}, 15 * GB),  # two homes of each
        ({"disk_rated_writes": 2000 * GB, "max_steps": 10}, 20 * GB),  # a tenth of it in ten steps
        ({"disk_rated_writes": 2000 * GB, "max_steps": None}, 98 * GB),
        ({"disk_rated_writes": "accept", "max_steps": 10**6}, 98 * GB),
    ],
)
def test_states_may_take_what_is_free_what_the_job_gives_and_what_the_drive_may_take_in_its_steps(
    job: Job, keys: dict[str, object], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(total=4000 * GB, free=100 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    asked = job.model_copy(update={"max_steps": 1, **keys})
    assert with_own_drive(asked, HARDWARE).disk_bytes == room


def test_where_one_drive_has_too_little_room_the_others_have_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.disk_paths is not None
    free = dict(zip(job.disk_paths, (100 * GB, 10 * GB), strict=True))
    for path in free:
        Path(path).mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=4000 * GB, free=free[str(path)]))
    monkeypatch.setattr("planner.machine.drives.devices", lambda folders: list(range(len(folders))))
    asked = job.model_copy(update={"disk_rated_writes": "accept", "save_total_limit": 2})
    assert with_own_drive(asked, HARDWARE).disk_bytes == 98 * GB + 98 * GB // 10
    for path in free:
        Path(path).rmdir()


def test_a_drive_that_is_only_asked_about_is_not_this_machines(job: Job) -> None:
    asked = job.model_copy(update={"disk_paths": (str(Path("/not/there")),)})
    assert with_drive(asked, HARDWARE).disk_bytes > 10**15
    assert with_drive(asked.model_copy(update={"disk_budget": GB}), HARDWARE).disk_bytes == GB


@pytest.mark.parametrize(
    ("rooms", "bytes_of"),
    [
        ([100 * GB, 100 * GB], [20 * GB, 10 * GB]),
        ([100 * GB, 5 * GB], [25 * GB, 5 * GB]),  # the rest goes where there is room
        ([12 * GB, 100 * GB], [12 * GB, 18 * GB]),
        ([100 * GB, 0], [30 * GB, 0]),
        ([5 * GB, 5 * GB], [5 * GB, 5 * GB]),  # too little: what keeps the states says so
    ],
)
def test_drives_get_parts_by_their_rates_as_far_as_they_have_room(rooms: list[int], bytes_of: list[int]) -> None:
    assert drive.dealt(30 * GB, [(2e9, rooms[0]), (1e9, rooms[1])]) == bytes_of


def test_a_drive_too_full_to_be_measured_has_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Path]] = []
    monkeypatch.setattr(drive, "_rates_of", lambda folders: asked.append(folders) or [(6e9, 3e9)] * len(folders))
    monkeypatch.setattr(drive, "devices", lambda folders: list(range(len(folders))))
    folders = [Path("/a"), Path("/b"), Path("/c")]
    monkeypatch.setattr(drive, "rooms", lambda _: [100 * GB, 10**6, 100 * GB])
    assert drive.shares(folders, 30 * GB) == [15 * GB, 0, 15 * GB] and asked == [[Path("/a"), Path("/c")]]
    monkeypatch.setattr(drive, "rooms", lambda _: [0, 100 * GB, 10**6])
    assert drive.shares(folders, 30 * GB) == [0, 1, 0]
    monkeypatch.setattr(drive, "rooms", lambda _: [0, 0, 0])
    assert drive.shares(folders, 30 * GB) == [1, 1, 1]  # what keeps the states says so


def test_what_a_drive_is_measured_with_is_nobodys_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[list[Path]] = []

    def timed(move: object) -> tuple[int, float]:
        there.append([path for path in tmp_path.rglob("*") if path.is_file()])
        return 2**20, 0.01

    monkeypatch.setattr(drive, "_timed", timed)
    monkeypatch.setattr(drive, "_BYTES", 2**12)
    drive.rates(tmp_path)
    assert there == [[], []] and not list(tmp_path.iterdir())


def test_several_drives_are_as_fast_as_their_parts_of_a_piece(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_rates_of", lambda folders: [(6e9, 3e9), (2e9, 2e9)])  # 2 and 1 GB/s, there and back
    found = with_rates(job, HARDWARE)
    assert found.disk_read_bytes_per_s == pytest.approx(2e9 * 3)  # the second has a third of each piece
    assert found.disk_write_bytes_per_s == pytest.approx(3e9 * 3 / 2)
    assert drive.shares([Path("/"), Path("/")], 30 * GB)[0] > 1


def test_folders_on_one_drive_have_its_rate_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "rates", lambda folder: (6e9, 4e9))
    assert drive._rates_of([tmp_path / "a", tmp_path / "b"]) == [(3e9, 2e9), (3e9, 2e9)]

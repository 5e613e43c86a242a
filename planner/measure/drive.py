"""Measures the drives that a job names for optimizer states, and divides the states among them."""

from __future__ import annotations

import functools
import mmap
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from planner.cpu.direct_file import DirectFile
from planner.errors import UserError
from planner.job.room import at_most, with_drive
from planner.job.schema import Job
from planner.machine.drives import MEASURED_BYTES, check_place, devices, rooms, usable
from planner.machine.hardware import Hardware
from planner.schedule.disk_use import most_written_bytes

_ANY = 2**62
_TIMES = 16
_BYTES = MEASURED_BYTES // _TIMES
_PATIENCE_S = 1.0


def with_own_drive(job: Job, hardware: Hardware) -> Hardware:
    """`hardware` with the disk space that the job can really use on this machine: as in `with_drive`, but at most the
    free space on the drives. If the job says how many steps it has, at most the bytes that may be written to the
    drives in each step, too."""
    if not job.disk_paths:
        return hardware
    folders = list(map(Path, job.disk_paths))
    written = most_written_bytes(
        job.disk_paths, job.disk_rated_writes, steps=job.max_steps, parts=lambda: expected_shares(folders)
    )
    try:
        room = rooms(folders)
        free = sum(room[k] for k in usable(room))
    except OSError:  # the code that stores the states reports why
        free = _ANY
    return at_most(min(free // job.state_homes, _ANY if written is None else written), with_drive(job, hardware))


def with_rates(job: Job, hardware: Hardware) -> Hardware:
    """`hardware` with the bytes per second that the job's drives read and write together, where each drive holds its
    share of every piece of data. They are measured with a temporary file on each drive. Unchanged if they cannot be
    measured: the code that stores the states reports why."""
    folders = list(map(Path, job.disk_paths or ()))
    try:
        rates = _rates_of([folders[k] for k in usable(rooms(folders))])
    except OSError:
        return hardware
    parts = [speed / sum(map(_speed, rates)) for speed in map(_speed, rates)]
    read, write = (1 / max(part / of[k] for part, of in zip(parts, rates, strict=True)) for k in (0, 1))
    return replace(hardware, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write)


def shares(folders: Sequence[Path], need_bytes: int) -> list[int]:
    """Divide `need_bytes` among the folders' drives. Returns one number per folder: its bytes, or 1 and 0 if a single
    drive takes all. All drives take equally long to read and write their share, but none gets more than it has room
    for. A drive without room for the measurement gets none. Raises OSError."""
    room = rooms(folders)
    used = usable(room)
    if len(used) == 1:
        return [int(k in used) for k in range(len(folders))]
    if len(set(devices(folders))) == 1:
        speeds = [1.0] * len(used)
    else:
        speeds = list(map(_speed, _rates_of([folders[k] for k in used])))
    share_of = dict(zip(used, dealt(need_bytes, list(zip(speeds, (room[k] for k in used), strict=True))), strict=True))
    return [share_of.get(k, 0) for k in range(len(folders))] if any(share_of.values()) else [1] * len(folders)


def expected_shares(folders: Sequence[Path], need_bytes: int = 0) -> list[int]:
    """The shares that `shares` would give each folder for `need_bytes`; equal shares if the drives cannot be measured.
    0: for so few bytes that all drives have room."""
    try:
        for folder in folders:
            check_place(folder)
        return shares(folders, need_bytes or MEASURED_BYTES)
    except (OSError, UserError):  # the code that stores the states reports why
        return [1] * len(folders)


def dealt(need_bytes: int, drives: Sequence[tuple[float, int]]) -> list[int]:
    """Divide `need_bytes` among drives, given as (speed, room in bytes): in proportion to the speeds, as far as there
    is room. Returns bytes per drive."""
    parts, open_ = [0] * len(drives), {k: drive for k, drive in enumerate(drives) if drive[1]}
    while open_:
        speed_sum = sum(speed for speed, _ in open_.values())
        wanted = {k: int(need_bytes * speed / speed_sum) for k, (speed, _) in open_.items()}
        full = [k for k, size in wanted.items() if size > open_[k][1]]
        for k in full or list(open_):
            parts[k] = min(wanted[k], open_.pop(k)[1])
            need_bytes -= parts[k] if full else 0
    return parts


def _speed(rates: tuple[float, float]) -> float:
    """Bytes per second when each byte is both read and written."""
    return 1 / (1 / rates[0] + 1 / rates[1])


def _rates_of(folders: Sequence[Path]) -> list[tuple[float, float]]:
    """Bytes per second read from and written to each folder's drive. Folders on one drive get equal parts of its
    rates. Raises OSError."""
    alone: dict[int, tuple[float, float]] = {}
    for folder in folders:
        folder.mkdir(exist_ok=True)
        if folder.stat().st_dev not in alone:
            alone[folder.stat().st_dev] = _rates_once(folder)
    here = [folder.stat().st_dev for folder in folders]
    return [(alone[d][0] / here.count(d), alone[d][1] / here.count(d)) for d in here]


@functools.cache
def _rates_once(folder: Path) -> tuple[float, float]:
    """The result of `rates`, cached, so that a process that asks several times writes its file once."""
    return rates(folder)


def rates(folder: Path) -> tuple[float, float]:
    """Bytes per second read from and written to a folder's drive, measured with a temporary file. Raises OSError."""
    memory = torch.frombuffer(mmap.mmap(-1, _BYTES), dtype=torch.uint8).random_(256)
    folder.mkdir(exist_ok=True)  # without parents: the drive may not be mounted
    with tempfile.TemporaryDirectory(prefix=".offmate-", dir=folder) as place:
        file = DirectFile(Path(place) / "drive")
        try:
            file.reserve(_TIMES * _BYTES)
            file.path.unlink()  # so the file is gone when this process ends, for whatever reason
            written, write_s = _timed(lambda at: file.write(at, memory))
            file.flush()
            read, read_s = _timed(lambda at: file.read(at % written, memory))
        finally:
            file.close()
    return read / read_s, written / write_s


def _timed(move: Callable[[int], object]) -> tuple[int, float]:
    """Call `move` for one part of the file after another, for about a second at most. Returns the bytes moved and the
    seconds taken."""
    began = time.perf_counter()
    for number in range(_TIMES):
        move(number * _BYTES)
        if (taken := time.perf_counter() - began) > _PATIENCE_S:
            break
    return (number + 1) * _BYTES, taken

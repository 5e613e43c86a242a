"""Handles jobs whose disk is full: the space they need, whether it is free, and when they are tried again where that
cannot be seen.

A disk runs out of bytes, of files (inodes), or of one user's share of it (a quota). Its free space does not show a
quota."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offmated.jobs.again import is_time, tried_at, trying_again
from planner.errors import Room
from planner.run.folder import RunFolder
from planner.units import counted, format_bytes

_SPARE_BYTES, _SPARE_FILES = 64 * 2**20, 64  # or a twentieth of the disk, if that is less


def needing(error: Mapping[str, Any], run: RunFolder, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `error`, which says that a disk is full, with the space that has to be free for the job to go on. If
    the process said how much it needs, and the disk has less, the job goes on once that much is free: `again` is None.
    If the process did not say, the need is guessed from the run's disk; if the disk has as much as the process said, it
    is unknown. In both cases the job is also tried again by the clock, after twice the pause of `before`, the error
    with which it ended before."""
    needs = Room.of(error.get("needs"))
    if needs is not None and _missing(needs) != (0, 0):
        return {**error, "again": None}
    needs = _guessed(run) if needs is None else Room(needs.folder, 0)
    return trying_again({**error, "needs": needs.to_json()}, before)


def goes_on(error: Mapping[str, Any] | None) -> bool:
    """Whether a job that ended with `error`, a full disk, may go on: the space that it needs is free, or it is time to
    try. It is always time for an `error` without `again`, recorded by a version that did not try by the clock: its need
    was guessed and may never be met. Raises OSError when the disk does not answer."""
    fields = error or {}
    needs = Room.of(fields.get("needs"))
    if needs is not None and not needs.is_unseen and _missing(needs) == (0, 0):
        return True
    by_clock = needs is None or fields.get("again", {}) is not None
    return by_clock and is_time(fields)


def waiting_words(error: Mapping[str, Any] | None) -> str:
    """What a job that ended with `error`, a full disk, waits for, in words. Raises OSError when the disk does not
    answer."""
    needs = Room.of((error or {}).get("needs"))
    if error is None or needs is None:
        return "there is room again: it goes on"
    if goes_on(error):
        seen = not needs.is_unseen and _missing(needs) == (0, 0)
        return "there is room again: it goes on" if seen else "no room is seen yet; trying again now"
    missing_bytes, missing_files = _missing(needs)
    missing = [format_bytes(missing_bytes)] * bool(missing_bytes)
    missing += [counted(missing_files, "file")] * bool(missing_files)
    need = f"{' and '.join(missing)} missing at {needs.folder}" if missing else " ".join(error["numbers"][:1])
    again = f", tried again at {tried_at(error)}" if error.get("again") else ""
    return f"waiting for room: {need}; goes on by itself{again}"


def _guessed(run: RunFolder) -> Room:
    """A guess at the room that a job needs whose process could not say it: the size of its newest checkpoint, and a
    reserve. The disk may have that much free now, as the process removed the files it had begun; then the guess is what
    is free now, and the reserve."""
    step = run.last_checkpoint_step()
    saved = [] if step is None else [*(run.checkpoints / f"step-{step}").glob("*")]
    disk = os.statvfs(run.path)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    spare_bytes, spare_files = min(_SPARE_BYTES, total // 20), min(_SPARE_FILES, disk.f_files // 20)
    wanted_bytes, wanted_files = sum(file.stat().st_size for file in saved) + spare_bytes, len(saved) + spare_files
    if disk.f_files and disk.f_favail < wanted_files:  # 0 where files are not counted
        return Room(str(run.path), wanted_bytes if free < wanted_bytes else 0, wanted_files)
    return Room(str(run.path), wanted_bytes if free < wanted_bytes else free + spare_bytes)


def _missing(needs: Room) -> tuple[int, int]:
    """The bytes and the files that are missing on the disk of `needs.folder`, which may not exist yet. Raises OSError
    when the disk does not answer."""
    path = Path(needs.folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    disk = os.statvfs(path)
    files = needs.files - disk.f_favail if disk.f_files else 0
    return max(0, needs.bytes - disk.f_bavail * disk.f_frsize), max(0, files)

"""Checks and makes the folders on the drives that a job names: each must be on a real drive and have room."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from planner.errors import Room, UserError, first_line, is_disk_full
from planner.machine.drives import check_place
from planner.units import format_bytes

log = logging.getLogger(__name__)

_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


def prepared(folder: Path, contents: str) -> Path:
    """Make the folder `folder` if it does not exist, and return its resolved path. Its parent is made too, but nothing
    above it: else files meant for a drive that is not mounted would land on the disk below. `contents`: what is to be
    kept there, for error messages. Raises UserError "disk-is-memory", "disk-failed", and what `check_place` raises."""
    check_place(folder.parent)
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        kind = _IN_MEMORY.get(_file_system(folder))
    except OSError as error:
        if is_disk_full(error):  # `check_room` raises later, if the folder is to have a share
            return folder.resolve()
        raise UserError(
            f"A folder for {contents} cannot be used.",
            code="disk-failed",
            numbers=(first_line(error),),
            hint="check the disk, and to the rights of the folder",
        ) from error
    if kind is not None:
        raise UserError(
            "This folder is in memory, not on a drive.",
            code="disk-is-memory",
            numbers=(f"{folder} is a {kind}",),
            hint="give a folder on a drive",
        )
    return folder.resolve()


def _file_system(folder: Path) -> int:
    """The type number of the folder's file system: the first word that statfs gives."""
    fields = (ctypes.c_long * 64)()
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), fields) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return int(fields[0])


def tidy(folders: Sequence[Path], pattern: str, needed: Sequence[Path] = ()) -> None:
    """Remove from `folders` the files that match `pattern`, except those in `needed`: a process that was killed before
    its first checkpoint leaves some behind."""
    for path in (path for folder in folders for path in folder.glob(pattern)):
        if path not in needed:
            log.info("disk: %s belongs to no checkpoint; removed", path)
            path.unlink(missing_ok=True)


def check_room(paths: Sequence[Path], sizes: Sequence[int], contents: str) -> None:
    """Raise UserError "disk-too-small" where the disks have no room for files at `paths` of these `sizes` (bytes).
    Several of them may be on one disk. `contents`: what the files are to hold, for the message."""
    needed: dict[int, int] = {}
    used = {path: size for path, size in zip(paths, sizes, strict=True) if size}
    for path, size in used.items():
        if not path.parent.is_dir():
            raise _too_small(path.parent, size, 0, contents)
        disk = path.parent.stat().st_dev
        needed[disk] = needed.get(disk, 0) + size
    for path in used:
        size, free = needed[path.parent.stat().st_dev], shutil.disk_usage(path.parent).free
        if free < size:
            raise _too_small(path.parent, size, free, contents)


def _too_small(folder: Path, needed: int, free: int, contents: str) -> UserError:
    return UserError(
        f"The disk has no room for the {contents}.",
        code="disk-too-small",
        numbers=(f"needed {format_bytes(needed)}, free {format_bytes(free)} at {folder}",),
        hint="free some space, or give a folder on a larger drive",
        needs=Room(str(folder), needed),
    )


def refused(path: Path, size: int, error: OSError, contents: str) -> UserError:
    """Make the UserError for a file of `size` bytes at `path` that cannot be created because of `error`:
    "disk-too-small", "disk-not-direct" or "disk-failed". `contents`: what the file is to hold, for the message."""
    if is_disk_full(error):
        return _too_small(path.parent, size, shutil.disk_usage(path.parent).free, contents)
    if error.errno == errno.EINVAL:
        return UserError(
            "The file system does not support direct reads and writes.",
            code="disk-not-direct",
            numbers=(f"{path.parent}: {first_line(error)}",),
            hint="give a folder on ext4, xfs or btrfs",
        )
    return UserError(
        f"The {contents} cannot be kept there.",
        code="disk-failed",
        numbers=(f"{path}: {first_line(error)}",),
        hint="check the disk, and to the rights of the folder",
    )

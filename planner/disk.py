"""Flushes files to disk, and checks whether a disk has room."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from planner.errors import Room, UserError
from planner.units import format_bytes


def sync(path: Path) -> None:
    """Flush a file or a folder to disk (fsync). A folder whose file system cannot do that is skipped."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder in `folder`, and `folder` itself, to disk (fsync)."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def check_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise UserError if the disk of `folder` has less than `needed_bytes` free. `purpose`: what the space is for, in
    words."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise UserError(
            f"The disk has no room for {purpose}.",
            code="disk-full",
            numbers=(f"needed {format_bytes(needed_bytes)}, free {format_bytes(free)} at {folder}",),
            hint="free some space, or lower save_total_limit; the job goes on from its last checkpoint",
            needs=Room(str(folder), needed_bytes),
        )

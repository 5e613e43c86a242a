"""Keeps the daemon's log file short while it is being written."""

from __future__ import annotations

import os
import shutil
import sys

from offmated.paths import Paths

LOG_BYTES = 10 * 1024**2
"""The most bytes of the log. A larger one is put aside, in place of the one put aside before."""


def keep_short(paths: Paths, at_most: int = LOG_BYTES) -> None:
    """Move the content of the daemon's log to `log_before` if the log has more than `at_most` bytes and this process
    writes to it. The file is copied and emptied, not replaced: the workers and the broker go on writing to the same
    open file, and under systemd the file is systemd's. Raises OSError."""
    import fcntl  # late: Windows has no such module, and the command line imports this file

    ours = os.fstat(sys.stderr.fileno())
    try:
        status = paths.log.stat()
    except FileNotFoundError:
        return
    if status.st_size <= at_most or (status.st_dev, status.st_ino) != (ours.st_dev, ours.st_ino):
        return
    if not fcntl.fcntl(sys.stderr.fileno(), fcntl.F_GETFL) & os.O_APPEND:  # writing would go on behind a gap
        return
    beside = paths.log_before.with_name(f".{paths.log_before.name}.new")
    try:
        shutil.copyfile(paths.log, beside)
        beside.replace(paths.log_before)
    finally:
        beside.unlink(missing_ok=True)
    os.truncate(paths.log, 0)

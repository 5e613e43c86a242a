"""Lets only one daemon of an installation run at a time."""

from __future__ import annotations

import os

from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.run.processes import Process


class Lock:
    """The lock that the running daemon holds, so that a second one cannot start. It is never released: the system drops
    it when the process is gone, with all its threads and however it ends. (filelock would release it when the
    interpreter begins to exit.)"""

    def __init__(self, paths: Paths) -> None:
        """Take the lock. Raises UserError `already-running`."""
        self._paths = paths
        self._descriptor = _take(paths)

    def keep(self) -> None:
        """Take the lock again if its file was deleted; otherwise a second daemon could start. Raises UserError
        `already-running` when one has started, and OSError."""
        try:
            is_ours = os.path.samestat(os.fstat(self._descriptor), self._paths.lock.stat())
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            before, self._descriptor = self._descriptor, _take(self._paths)
            os.close(before)


def lock_holder(paths: Paths) -> Process | None:
    """The process of the daemon that took the lock last, as its file says; None when that process is not alive."""
    try:
        process = Process.parse(paths.lock.read_text().strip())
    except (FileNotFoundError, ValueError):
        return None
    return process if process.alive() else None


def _take(paths: Paths) -> int:
    """The descriptor of the locked lock file: a number, as a file object would be closed once nothing refers to it."""
    import fcntl  # late: Windows has no such module, and the command line imports this file

    descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        holder = lock_holder(paths)
        raise UserError(
            "A daemon runs already.",
            numbers=(f"process {holder.pid if holder else 'unknown'}, state folder {paths.state}",),
            hint="offmate status, or offmate down to end it",
            code="already-running",
            exit_code=Exit.USAGE,
        ) from None
    text = f"{Process.current()}\n".encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))  # in this order, so that a reader finds a process at every moment
    return descriptor

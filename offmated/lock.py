"""One daemon of an installation at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from offmated.paths import Paths
from planner.errors import UserError
from planner.run.processes import Process


@contextmanager
def sole_daemon(paths: Paths) -> Iterator[None]:
    """Hold the lock that one daemon has. The system drops it with the process, however it ends. Raises UserError
    `already-running`."""
    with paths.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock_holder(paths)
            raise UserError(
                "A daemon runs already.",
                numbers=(f"process {holder.pid if holder else 'unknown'}, state folder {paths.state}",),
                hint="offmate status, or offmate down to end it",
                code="already-running",
            ) from None
        lock.truncate(0)
        lock.write(f"{Process.current()}\n")
        lock.flush()
        yield


def lock_holder(paths: Paths) -> Process | None:
    """The living process that wrote itself into the lock file last; None when there is none."""
    try:
        process = Process.parse(paths.lock.read_text().strip())
    except (FileNotFoundError, ValueError):
        return None
    return process if process.alive() else None

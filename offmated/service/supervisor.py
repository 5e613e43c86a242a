"""Keeps the daemon's child processes alive: starts them, starts them again when they die, and ends them."""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from planner.run.processes import Process, spawn

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 30.0
HEALTHY_AFTER_S = 10.0  # a child that lived this long is started again without delay


class Child:
    """A child process of the daemon that is kept alive. It has a session of its own, so that Ctrl-C at a daemon in the
    foreground does not reach it, and it dies with the thread that started it. `folder`: its working folder, made again
    if it was deleted. `socket`: the socket file at which it listens; when that is deleted, the process is of no use and
    is started again."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        socket: Path | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._command = command
        self._folder = folder
        self._environment = environment
        self._socket = socket
        self._listens = False
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0
        self._due = 0.0

    @property
    def pid(self) -> int | None:
        """The process's number; None while it waits for its next start."""
        return self._process.pid if self._process is not None else None

    def keep(self) -> None:
        """Start the process if it is not running and its next start is due. Also notices that it died, and ends it if
        its socket file was deleted. Raises OSError."""
        now = time.monotonic()
        if self._reap():
            self._failures = 0 if now - self._started > HEALTHY_AFTER_S else self._failures + 1
            delay = min(FIRST_DELAY_S * 2 ** (self._failures - 1), LONGEST_DELAY_S) if self._failures else 0.0
            self._due = now + delay
            self.restarts += 1
        if self._process is None and now >= self._due:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the daemon's umask closes the parents, too
            self._process = spawn(self._command, folder=self._folder, environment=self._environment)
            self._started, self._listens = now, False
        if self._socket is not None and self._process is not None:
            if self._socket.is_socket():
                self._listens = True
            elif self._listens:
                log.warning("%s was deleted: %s starts again", self._socket, self.name)
                self.terminate()

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the process."""
        if self._process is not None:
            self._process.kill()

    def children(self) -> tuple[Process, ...]:
        """The living child processes of this process."""
        return living_children(self._process.pid) if self._process is not None else ()

    def gone(self) -> bool:
        """Whether the process has ended. It is not started again."""
        self._reap()
        return self._process is None

    def _reap(self) -> bool:
        if self._process is None or (code := self._process.poll()) is None:
            return False
        level = logging.INFO if code == 0 else logging.WARNING
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        log.log(level, "%s (process %d) ended: %s", self.name, self._process.pid, how)
        self._process = None
        return True


def living_children(pid: int) -> tuple[Process, ...]:
    """The living child processes of the process `pid`; none when that process itself is gone."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return ()
    return tuple(filter(None, (Process.of(child.pid) for child in children)))

"""Identifies processes even when a pid is used again, and starts children that die with their parent.

Imports only the standard library, and nothing of this project: this file is also run as a program (see `spawn`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GONE = (errno.ESRCH, errno.ENOENT, errno.EINVAL)  # depending on the kernel, the last two: the number is a thread's now


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The identity of a process: its pid, its start in clock ticks after boot, and the boot's id. Start and boot
    distinguish the process from a later one with the same pid."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """The process with this pid; None if there is none, or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        state, *fields = _fields(stat)
        if state in "ZX":
            return None
        return cls(pid=pid, started=int(fields[18]), boot=_boot())

    @classmethod
    def current(cls) -> Process:
        """The identity of the calling process."""
        process = cls.of(os.getpid())
        assert process is not None
        return process

    @classmethod
    def parse(cls, text: str) -> Process:
        """The process that `text` describes, a result of `str(process)`. Raises ValueError."""
        pid, started, boot = text.split(":")
        return cls(pid=int(pid), started=int(started), boot=boot)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}:{self.boot}"

    def alive(self) -> bool:
        """Whether this very process still runs, not only another one with its pid."""
        return Process.of(self.pid) == self

    def this_boot(self) -> bool:
        """Whether the process was started since the machine's last boot."""
        return self.boot == _boot()

    def send(self, number: int) -> bool:
        """Send the signal `number` to the process; returns False if the process has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        try:
            if not self.alive():  # checked after opening the descriptor, which cannot come to mean another process
                return False
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True

    def kill(self, patience_s: float = 10.0) -> None:
        """Send SIGKILL and wait until the process has ended. Raises TimeoutError after `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while self.send(signal.SIGKILL):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} did not end within {patience_s:.0f} s of SIGKILL")
            time.sleep(0.01)


def end_session(leader: int, folder: Path, patience_s: float = 10.0) -> None:
    """Send SIGKILL to the processes of a session (`setsid`) that work in `folder`, and wait until they have ended.

    `leader`: pid of the process that began the session; it may have ended already. Processes in other folders are left
    alone, because the session's number may belong to another program by now. Processes that are started in the meantime
    are killed, too. Raises TimeoutError after `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while processes := [process for process in _session(leader) if _works_in(process.pid, folder)]:
        for process in processes:
            process.send(signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {processes[0].pid} did not end within {patience_s:.0f} s of SIGKILL")
        time.sleep(0.01)


def _session(leader: int) -> list[Process]:
    """The living processes of a session."""
    processes = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):  # gone meanwhile
                if int(_fields((path / "stat").read_text())[3]) == leader:
                    processes.append(Process.of(int(path.name)))
    return [process for process in processes if process is not None]


def _works_in(pid: int, folder: Path) -> bool:
    with suppress(OSError):  # gone, or another user's
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    return False


def _fields(stat: str) -> list[str]:
    """The state, parent, group, session, … from a process's `stat`. The command before them, in brackets, may itself
    hold spaces and brackets."""
    return stat.rpartition(")")[2].split()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def die_with(parent: int) -> None:
    """Let the kernel send SIGKILL to this process when the thread that started it ends. Ends this process at once if
    `parent` is no longer its parent. Raises OSError if the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def spawn(
    command: Sequence[str],
    *,
    folder: Path,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command` in `folder`, in a session of its own and with empty input. The kernel kills it when the calling
    thread ends.

    A short Python program calls prctl and then becomes the command, because code between fork and exec (`preexec_fn`)
    is not safe in a process with threads. That program also clears the signal mask that a caller who waits with
    sigtimedwait has set. `output`, `errors`: files for stdout and stderr; None: the caller's. `environment`: variables
    to add to the caller's.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


def _become(parent: str, *command: str) -> None:
    die_with(int(parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(*sys.argv[1:])

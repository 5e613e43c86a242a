"""Starts the daemon in the background. It imports little and fast, as commands need it at their start."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from offmated.cli.client import Client, daemon_silent
from offmated.cli.service import start_installed
from offmated.lock import lock_holder
from offmated.log_file import LOG_BYTES
from offmated.paths import Paths
from planner.errors import UserError
from planner.run.processes import Process

START_PATIENCE_S = 60.0
OTHER_PATIENCE_S = 15.0  # for a daemon that holds the lock, and is just starting or ending
TRIES = 5
TAIL_LINES = 15


def start_in_background(paths: Paths) -> bool:
    """Start a daemon in the background and wait until it answers. Returns False when one answered already. A daemon
    that is stopping is waited for, which takes as long as its jobs take to save checkpoints.

    Two callers may start a daemon at once: one wins, and both have a daemon. Raises UserError with the end of the
    daemon's log when it does not come up, and `daemon-silent` when there is a daemon that cannot be reached."""
    client = Client(paths)
    if (health := client.health_if_running()) is not None:
        if health["state"] == "running":
            return False
        stopping = Process.parse(health["process"])
        while stopping.alive():
            time.sleep(0.05)
    paths.create()
    if start_installed(paths):  # or a daemon of ours would keep the service from starting at the next login
        deadline = time.monotonic() + START_PATIENCE_S
        while not client.running():
            if time.monotonic() > deadline:
                raise daemon_silent(paths, "systemd has started it")
            time.sleep(0.05)
        return True
    for _ in range(TRIES):
        if _start(client, paths):
            return True
    raise daemon_silent(paths, f"the lock {paths.lock} is held by an unknown process")


def runs(paths: Paths) -> bool:
    """Whether a daemon answers. A daemon that does not listen at the moment, because it is starting or ending or its
    socket was deleted, is waited for. Raises UserError `daemon-silent` when that takes too long."""
    client, deadline = Client(paths), time.monotonic() + OTHER_PATIENCE_S
    while not client.running():
        if lock_holder(paths) is None:
            return False
        if time.monotonic() > deadline:
            raise daemon_silent(paths, "nothing listens there")
        time.sleep(0.05)
    return True


def _start(client: Client, paths: Paths) -> bool:
    """Start a daemon and wait until one answers. Returns False when another daemon held the lock and has ended
    meanwhile."""
    if paths.log.exists() and paths.log.stat().st_size > LOG_BYTES:
        paths.log.replace(paths.log_before)
    with open(paths.log, "ab", opener=_closed) as log:  # Path.open takes no opener
        start = log.tell()
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "offmated"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=paths.state,  # the caller's folder may be unmounted later
            env={**os.environ, **paths.environment()},
            start_new_session=True,
        )
    deadline = time.monotonic() + START_PATIENCE_S
    other_deadline = float("inf")
    while not client.running():
        now = time.monotonic()
        if daemon.poll() is not None:
            if "[already-running]" not in _said(paths, start):
                raise _failed(paths, start, f"it ended with exit code {daemon.returncode}")
            if lock_holder(paths) is None:
                return False
            other_deadline = min(other_deadline, now + OTHER_PATIENCE_S)
        if now > other_deadline:
            raise daemon_silent(paths, f"nothing listens there, and a second daemon may not start ({paths.lock})")
        if now > deadline:
            daemon.terminate()
            raise _failed(paths, start, f"no answer within {START_PATIENCE_S:.0f} s")
        time.sleep(0.05)
    return True


def _closed(path: str, flags: int) -> int:
    """Open a file that no other user may read, whatever the umask is."""
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _said(paths: Paths, start: int) -> str:
    return paths.log.read_bytes()[start:].decode(errors="replace")


def _failed(paths: Paths, start: int, how: str) -> UserError:
    return UserError(
        "The daemon did not start.",
        numbers=(how, *_said(paths, start).splitlines()[-TAIL_LINES:]),
        hint=f"the log is {paths.log}",
        code="daemon-did-not-start",
    )

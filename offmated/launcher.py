"""Starts the daemon in the background. Light, as commands import it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from offmated.client import Client
from offmated.paths import Paths
from planner.errors import UserError

START_PATIENCE_S = 60.0
TAIL_LINES = 15


def start_in_background(paths: Paths) -> bool:
    """Start a daemon and wait until one answers; False when one answered already.

    Two that are started at once are no mistake: one wins, and both callers have a daemon. Raises UserError with the end
    of its log when it does not come up.
    """
    client = Client(paths)
    if client.running():
        return False
    paths.create()
    with paths.log.open("ab") as log:
        start = log.tell()
        daemon = subprocess.Popen(
            [sys.executable, "-m", "offmated"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=paths.state,  # the caller's folder would come first on the module path, and may be unmounted later
            env={**os.environ, **paths.environment()},
            start_new_session=True,
        )
    deadline = time.monotonic() + START_PATIENCE_S
    while not client.running():
        if daemon.poll() is not None and "[already-running]" not in _said(paths, start):
            raise _failed(paths, start, f"it ended with exit code {daemon.returncode}")
        if time.monotonic() > deadline:
            daemon.terminate()
            raise _failed(paths, start, f"no answer within {START_PATIENCE_S:.0f} s")
        time.sleep(0.05)
    return True


def _said(paths: Paths, start: int) -> str:
    return paths.log.read_bytes()[start:].decode(errors="replace")


def _failed(paths: Paths, start: int, how: str) -> UserError:
    return UserError(
        "The daemon did not start.",
        numbers=(how, *_said(paths, start).splitlines()[-TAIL_LINES:]),
        hint=f"the log is {paths.log}",
        code="daemon-did-not-start",
    )

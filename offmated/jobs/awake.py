"""Keeps the machine from going to sleep by itself while a job runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def awake(why: str) -> Iterator[None]:
    """A context during which the machine does not go to sleep by itself, where systemd's logind accepts such a request;
    elsewhere it does nothing. `why` is the reason that logind shows. The request ends with this process, however that
    ends: the child that holds it waits for the end of a pipe.

    "idle" and "sleep" are inhibited one by one: logind lets every user inhibit "idle", but "sleep" only for users who
    sit at the machine."""
    command = shutil.which("systemd-inhibit")
    holders = []
    for what in ("idle", "sleep") if command is not None else ():
        words = [str(command), f"--what={what}", "--who=offmate", f"--why={why}", "--mode=block", "cat"]
        with suppress(OSError):  # a job does not fail because of this
            holders.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
    try:
        yield
    finally:
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.kill()  # it may hang, waiting for the bus
            holder.wait()

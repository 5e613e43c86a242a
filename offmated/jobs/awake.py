"""The machine does not go to sleep by itself while a job works."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def awake(why: str) -> Iterator[None]:
    """Sleep by idleness or by a closed lid is held off in the body, where systemd's logind takes such a wish; elsewhere
    nothing happens. It ends with this process, however that ends: who holds it waits for the end of a pipe."""
    command = shutil.which("systemd-inhibit")
    if command is None:
        yield
        return
    what = ["--what=sleep:idle:handle-lid-switch", "--who=offmate", f"--why={why}", "--mode=block", "cat"]
    holder = subprocess.Popen(
        [command, *what], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        assert holder.stdin is not None
        holder.stdin.close()
        holder.kill()  # a bus that hangs would keep it
        holder.wait()

"""The machine does not go to sleep by itself while a job works."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def awake(why: str) -> Iterator[None]:
    """Sleep is held off in the body, where systemd's logind takes such a wish; elsewhere nothing happens. It ends with
    this process, however that ends: who holds it waits for the end of a pipe.

    Idleness and sleep are asked for one by one: logind lets everybody hold off the first, and the second only those
    who sit at the machine.
    """
    command = shutil.which("systemd-inhibit")
    holders = []
    for what in ("idle", "sleep") if command is not None else ():
        words = [str(command), f"--what={what}", "--who=offmate", f"--why={why}", "--mode=block", "cat"]
        with suppress(OSError):  # no job fails for that
            holders.append(
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
    try:
        yield
    finally:
        for holder in holders:
            assert holder.stdin is not None
            holder.stdin.close()
            holder.kill()  # a bus that hangs would keep it
            holder.wait()

"""Limits the processor time and memory of a process that reads files from unknown sources.

A small file can be made to fill any memory, or to keep a program computing for ever. Only the kernel sees all memory
that a process takes, so the kernel's limits are used.
"""

from __future__ import annotations

import math
import mmap
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.errors import Exit, UserError
from planner.system import IS_LINUX, lowered, signals

MOST_S = 30
"""Seconds of processor time allowed for each thing that is read, such as an entry of `dataset`."""
MOST_BYTES = 2 * 2**30
"""Bytes of writable memory that the process may take in addition to what it has when the limit is set."""
OUT_OF_MEMORY = f"more than {MOST_BYTES // 2**30} GiB of memory"
_BY_SIGNAL = {
    **dict.fromkeys(signals("SIGXCPU"), f"more than {MOST_S} s of the processor's time"),
    signal.SIGABRT: OUT_OF_MEMORY,  # libraries in C++ and Rust abort if they get no memory
}


@contextmanager
def bounded(*, memory: bool = True, things: int = 1) -> Iterator[None]:
    """A context in which the kernel ends this process (signal SIGXCPU) once it has used `things` × `MOST_S` seconds of
    processor time. With `memory`, an allocation beyond `MOST_BYTES` raises MemoryError there. Only private writable
    memory counts, not everything that is mapped: torch and Arrow map far more than they use.

    On macOS only the time is limited, and on Windows nothing."""
    seconds = math.ceil(time.process_time()) + things * MOST_S  # the kernel counts whole seconds: round up
    limits = {"RLIMIT_CPU": seconds, "RLIMIT_CORE": 0}
    limits |= {"RLIMIT_DATA": _taken_bytes() + MOST_BYTES} if memory and IS_LINUX else {}
    with lowered(limits):
        yield


def _taken_bytes() -> int:
    """Bytes that count for the limit and are taken already, such as those of loaded libraries."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[5]) * mmap.PAGESIZE


def takes_too_much(source: str, number: str) -> UserError:
    """The UserError for a file or other `source` whose reading exceeds a limit. `number`: the limit, in words."""
    return UserError(
        f"Reading {source} takes too much time or memory.",
        code="takes-too-much",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint="a small file may unpack to gigabytes: write it anew in smaller parts, or leave it out",
    )


def ended_by(number: int, source: str, *, kernel_kills: bool = False) -> UserError | None:
    """The UserError for a process that the signal `number` ended while it was reading `source`; None for signals that
    neither a limit nor a lack of memory explains.

    The sender of a SIGKILL is not known, and `source` need not be its cause. `kernel_kills`: in the meantime the kernel
    has killed some process because memory ran out.
    """
    if number == signal.SIGKILL:
        who = (
            "the kernel killed a process just then, as the machine had no memory left"
            if kernel_kills
            else ("who sent the signal is not known; the kernel does where the machine has no memory left")
        )
        return UserError(
            f"The process that looked at {source} was killed by signal 9 (SIGKILL).",
            code="look-killed",
            numbers=(who,),
            hint="try again when other programs use less memory; nothing is known to be wrong with the file",
        )
    return takes_too_much(source, _BY_SIGNAL[signal.Signals(number)]) if number in _BY_SIGNAL else None

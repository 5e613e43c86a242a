"""How the processes of a job end: with an exit code, and an error that a person can act on where there is one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from planner.errors import Exit, UserError, disk_full, is_disk_full
from planner.hub import NOT_REACHED
from planner.run.folder import RunFolder


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Within, SIGTERM, SIGHUP and SIGINT end the process as `sys.exit` does, with 128 and the signal's number, so that
    temporary folders go. Once is enough: those that follow are ignored. What is ignored already, as under nohup, stays
    so."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def leave(number: int, _: FrameType | None) -> None:
        for other in heard:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in heard:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


def exit_code_of(act: Callable[[], int], run: RunFolder | None) -> int:
    """What `act` returns, or the code of the UserError that it raises, which goes to stderr and to the run folder. A
    full disk is such an error, whoever met it. That the hub is not reached is said by who started the process, in one
    line with when it is asked again. Any other is our bug, and is raised."""
    try:
        return act()
    except UserError as error:
        told = error
    except Exception as error:
        if not is_disk_full(error):
            raise
        told = disk_full(error)
    try:
        if run is None or told.code != NOT_REACHED:
            print(told, file=sys.stderr, flush=True)
        if run is not None:
            run.write_error(told)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Exit.NO_ROOM_TO_SAY
    return told.exit_code

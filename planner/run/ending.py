"""How the processes of a job end: with an exit code, and an error that a person can act on where there is one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from planner.errors import Exit, UserError, disk_full, is_disk_full
from planner.hub import NOT_REACHED
from planner.run.folder import RunFolder

_AGAIN_S = 0.01


class _Left(SystemExit):
    """Raised by the signal that the process leaves on."""


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Within, SIGTERM, SIGHUP and SIGINT end the process as `sys.exit` does, with 128 and the signal's number, so that
    temporary folders go. Once is enough: those that follow are ignored, to the end. What is ignored already, as under
    nohup, stays so."""
    left, report = False, sys.unraisablehook

    def leave(number: int, _: FrameType | None) -> None:
        nonlocal left
        if not left:
            left = True
            raise _Left(128 + number)

    def swallowed(what: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised where it removes an object: the signal is sent again, when that is over."""
        nonlocal left
        if isinstance(what.exc_value, _Left):
            left = False
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), int(str(what.exc_value)) - 128)).start()
        else:
            report(what)

    before = _heard_by(leave)
    if before:
        sys.unraisablehook = swallowed
    try:
        yield
    finally:
        if not left:
            _restore(before)
        sys.unraisablehook = report


@contextmanager
def signals_wait() -> Iterator[None]:
    """Within, SIGTERM, SIGHUP and SIGINT wait: for what must not be left half done."""
    came: list[int] = []
    before = _heard_by(lambda number, _: came.append(number))
    try:
        yield
    finally:
        _restore(before)
        for number in came[:1]:
            signal.raise_signal(number)


def _heard_by(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Have these signals handled by `handler`. Returns who handled them; none where they are ignored, or this is not
    the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    heard = {int(number): former for number, former in before.items() if former is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handler)
    return heard


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    # For the log; a run folder is called by its job's number, but for some that were adopted.
    named = told.of_job(run.path.name) if run is not None and run.path.name.isdecimal() else told
    try:
        if run is None or told.code != NOT_REACHED:
            print(named, file=sys.stderr, flush=True)
        if run is not None:
            run.write_error(told)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Exit.NO_ROOM_TO_SAY
    return told.exit_code

"""Ends a job's processes with an exit code and, if something failed, an error text on which a person can act."""

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
from planner.system import signals

_AGAIN_S = 0.01


class _Left(SystemExit):
    """Raised in the handler of the signal that ends the process."""


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """A context in which SIGTERM, SIGHUP and SIGINT end the process as `sys.exit` does, so that temporary folders are
    removed. The exit code is 128 plus the signal's number. Only the first signal counts: later ones are ignored until
    the process has ended. Signals that are ignored already, as under nohup, stay ignored."""
    leaving, report, code = False, sys.unraisablehook, 0

    def leave(number: int, _: FrameType | None) -> None:
        nonlocal leaving, code
        if not leaving:
            leaving, code = True, 128 + number
            raise _Left(code)

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        """Send the signal again a moment later if Python has dropped the exception that it raised. Python drops an
        exception that is raised while it removes an object."""
        nonlocal leaving
        if isinstance(unraisable.exc_value, _Left):
            leaving = False
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), int(str(unraisable.exc_value)) - 128)).start()
        else:
            report(unraisable)

    before = _heard_by(leave)
    if before:
        sys.unraisablehook = swallowed
    try:
        yield
    except Exception:
        if leaving:  # a library has made an error of its own of the exception: highspy a TypeError
            raise _Left(code) from None
        raise
    finally:
        if not leaving:
            _restore(before)
        sys.unraisablehook = report


@contextmanager
def signals_wait() -> Iterator[None]:
    """A context that delays SIGTERM, SIGHUP and SIGINT until its end, for work that must not be left half done."""
    came: list[int] = []
    before = _heard_by(lambda number, _: came.append(number))
    try:
        yield
    finally:
        _restore(before)
        for number in came[:1]:
            signal.raise_signal(number)


def _heard_by(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let `handler` handle SIGTERM, SIGHUP and SIGINT. Returns their former handlers, without those of ignored signals;
    empty outside the main thread, which alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in signals("SIGTERM", "SIGHUP", "SIGINT")}
    heard = {int(number): former for number, former in before.items() if former is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, handler)
    return heard


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def exit_code_of(act: Callable[[], int], run: RunFolder | None) -> int:
    """Call `act` and return its exit code, or the exit code of the UserError that it raises.

    The error is written to stderr and to the run folder. A full disk counts as a UserError, wherever it is met. With a
    run folder, the error that the model hub is not reached is not printed: the parent process reports it, in one line
    with the time of the next try. Any other exception is a bug of offmate, and is raised.
    """
    try:
        return act()
    except UserError as error:
        failure = error
    except Exception as error:
        if not is_disk_full(error):
            raise
        failure = disk_full(error)
    # For the log. Except for some adopted ones, a run folder has its job's number as its name.
    named = failure.of_job(run.path.name) if run is not None and run.path.name.isdecimal() else failure
    try:
        if run is None or failure.code != NOT_REACHED:
            print(named, file=sys.stderr, flush=True)
        if run is not None:
            run.write_error(failure)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Exit.NO_ROOM_TO_SAY
    return failure.exit_code

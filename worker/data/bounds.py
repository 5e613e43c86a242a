"""Limits the time and memory that rendering a chat template may take.

A template is a program that came with somebody's tokenizer. It can do no other harm, but it can loop forever and
multiply texts."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Iterator
from types import FrameType

from planner.errors import Exit, UserError
from planner.system import HAS_TIMERS, IS_LINUX, lowered
from planner.units import format_bytes, format_seconds

MOST_S = 10.0
"""The most processor seconds for one rendering, which usually takes milliseconds."""
MOST_BYTES = 2**29
"""The most bytes of memory for one rendering, beside those that the process has already."""
MOST_TEXT, MOST_TIMES = 2**24, 16
"""A rendering may have MOST_TEXT characters, and beside these MOST_TIMES the characters of its conversation."""


class _OutOfTime(BaseException):
    """Raised in a rendering that takes too long. It is not an Exception, so that code that catches every Exception does
    not catch it."""


def check_length(text: str, characters: int) -> None:
    """Raise UserError where `text`, rendered by a chat template from messages of `characters` characters together, is
    unreasonably long."""
    if len(text) > MOST_TEXT + MOST_TIMES * characters:
        raise _too_much(f"{MOST_TEXT} characters and {MOST_TIMES} times the conversation's {characters}: {len(text)}")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A context that raises UserError where the code inside takes more than `MOST_S` seconds or `MOST_BYTES` bytes. It
    is for the main thread only; other threads must not work meanwhile. On macOS only the time is limited; on Windows
    nothing is."""
    with lowered({"RLIMIT_AS": _mapped_bytes() + MOST_BYTES} if IS_LINUX else {}):
        try:
            _clock.begin()
            yield
        except _OutOfTime:
            raise _too_much(f"{format_seconds(MOST_S)} of the processor's time") from None
        except MemoryError:
            raise _too_much(f"{format_bytes(MOST_BYTES)} of memory") from None
        finally:
            _clock.end()


class _Clock:
    """Raises _OutOfTime in a rendering that takes too long, on systems that have timers."""

    def __init__(self) -> None:
        self._runs = self._installed = False

    def begin(self) -> None:
        """Begin to count the time of a rendering."""
        if not HAS_TIMERS:
            return
        if not self._installed:  # for good: doing it anew for each rendering would take as long as the rendering
            signal.signal(signal.SIGPROF, self._stop)
            self._installed = True
        self._runs = True
        signal.setitimer(signal.ITIMER_PROF, MOST_S, 1.0)  # repeated, as the first exception may be swallowed

    def end(self) -> None:
        """The rendering has ended. The signal may still come a moment late, when there is none to stop."""
        self._runs = False
        if HAS_TIMERS:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self._runs:
            raise _OutOfTime


_clock = _Clock()


def _mapped_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)  # not by open(), as this runs thousands of times a second
    try:
        return int(os.read(file, 64).split()[0]) * mmap.PAGESIZE
    finally:
        os.close(file)


def _too_much(number: str) -> UserError:
    return UserError(
        "The chat template takes too much time or memory to render a conversation.",
        code="chat-template-too-much",
        exit_code=Exit.USAGE,
        numbers=(f"more than {number}",),
        hint="give another chat_template",
    )

"""Bounds on what a chat template may take. It is a program that came with somebody's tokenizer; nothing in it can do
harm, but it can count to infinity and multiply texts."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from types import FrameType

from planner.errors import Exit, UserError
from planner.units import format_bytes, format_seconds

MOST_S = 10.0
"""Of the processor, for one rendering; usual are milliseconds."""
MOST_BYTES = 2**29
"""Of memory, beside what the process has."""
MOST_TEXT, MOST_TIMES = 2**24, 16
"""Characters that any conversation's text may have, and how many times its own it may have beside these."""


class _OutOfTime(BaseException):
    """No Exception: nobody who goes on after any error is to go on after this one."""


def check_length(text: str, said: int) -> None:
    """Raise UserError where a rendering is long beyond reason for messages of `said` characters."""
    if len(text) > MOST_TEXT + MOST_TIMES * said:
        raise _too_much(f"{MOST_TEXT} characters and {MOST_TIMES} times the conversation's {said}: {len(text)}")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raises UserError where what is done inside takes more than `MOST_S` or `MOST_BYTES`. Main thread only; other
    threads have no work meanwhile."""
    _clock.install()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_lower(limits[0], _mapped_bytes() + MOST_BYTES), limits[1]))
        _clock.runs = True
        signal.setitimer(signal.ITIMER_PROF, MOST_S, 1.0)  # again, where the first was raised in nobody's hearing
        yield
    except _OutOfTime:
        raise _too_much(f"{format_seconds(MOST_S)} of the processor's time") from None
    except MemoryError:
        raise _too_much(f"{format_bytes(MOST_BYTES)} of memory") from None
    finally:
        _clock.runs = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, limits)


class _Clock:
    """Whether a rendering may be stopped: the signal may come a moment late."""

    def __init__(self) -> None:
        self.runs = self.installed = False

    def install(self) -> None:
        """Listen to the signal from now on, for good: asking again for every conversation takes as long as it."""
        if not self.installed:
            signal.signal(signal.SIGPROF, self.stop)
            self.installed = True

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Stop what is being rendered."""
        if self.runs:
            raise _OutOfTime


_clock = _Clock()


def _lower(limit: int, other: int) -> int:
    return other if limit == resource.RLIM_INFINITY else min(limit, other)


def _mapped_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)  # thousands of times a second
    try:
        return int(os.read(file, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(file)


def _too_much(number: str) -> UserError:
    return UserError(
        "The chat template takes too much time or memory to render a conversation.", code="chat-template-too-much",
        exit_code=Exit.USAGE, numbers=(f"more than {number}",), hint="give another chat_template",
    )  # fmt: skip

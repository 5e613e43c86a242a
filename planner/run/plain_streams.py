"""Cleans the output of a job's processes for a log that people read on terminals."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TextIO

from planner.errors import is_disk_full
from planner.units import printable


class PlainStream(io.TextIOBase):
    """Writes to `stream` without characters that would steer a terminal: data and models may contain anything. Text
    that a full disk does not take is lost: a job does not end because of its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` without control characters; returns its length."""
        self._try(lambda: self._stream.write(printable(text)))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write `text` of offmate's own, which has colours, and whose parts from data and models are plain already."""
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not is_disk_full(error):
                raise


def speak_plainly() -> None:
    """From now on, Python in this process writes to stdout and stderr through PlainStream, tracebacks too."""
    sys.stdout, sys.stderr = PlainStream(sys.stdout), PlainStream(sys.stderr)

"""Cleans the output of a job's processes for a log that people read on terminals."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TextIO

from planner.errors import is_disk_full
from planner.units import printable


class PlainStream(io.TextIOBase):
    """A text stream that writes to `stream` without control characters, since data and models may contain anything that
    steers a terminal. If the disk is full, the text is lost: a job must not fail because of its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` without control characters; returns the length of `text`."""
        self._try(lambda: self._stream.write(printable(text)))
        return len(text)

    def write_styled(self, text: str) -> None:
        """Write `text` as it is, with colours. The caller has removed control characters from what data and models
        contain."""
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Flush the underlying stream; a full disk is ignored."""
        self._try(self._stream.flush)

    def fileno(self) -> int:
        """The file descriptor of the underlying stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the underlying stream is a terminal."""
        return self._stream.isatty()

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not is_disk_full(error):
                raise


def speak_plainly() -> None:
    """Let all that Python writes to stdout and stderr in this process, tracebacks included, go through a PlainStream,
    which removes control characters."""
    sys.stdout, sys.stderr = PlainStream(sys.stdout), PlainStream(sys.stderr)

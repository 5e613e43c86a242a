"""Requests to stop, as signals."""

from __future__ import annotations

import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised where a request to stop arrives while nothing is worth a checkpoint."""


class StopRequest:
    """SIGTERM or SIGINT: the first asks for a stop at the end of the step, a second ends the process at once.

    Before `begin` was called a first one raises `Stopped` wherever the main thread is.
    """

    def __init__(self) -> None:
        self.asked = False
        self._begun = False

    def install(self) -> None:
        """Listen from now on. Main thread only."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def begin(self) -> None:
        """From now on a first request waits until somebody looks at `asked`."""
        self._begun = True

    @staticmethod
    def ignore() -> None:
        """From now on no request is heard, until the process has ended: Python gives up handlers before torch does the
        rest, which takes a second."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True
        if not self._begun:
            raise Stopped

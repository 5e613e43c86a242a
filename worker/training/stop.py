"""Handles requests to stop, which arrive as signals."""

from __future__ import annotations

import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """Raised where a request to stop arrives before there is anything worth a checkpoint."""


class StopRequest:
    """Handles SIGTERM and SIGINT as requests to stop. The first signal asks for a stop at the end of the step; a second
    ends the process at once.

    Before `begin` is called, the first signal raises `Stopped` wherever the main thread is."""

    def __init__(self) -> None:
        self.asked = False
        self._begun = False

    def install(self) -> None:
        """Install the handlers of both signals. Main thread only."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def begin(self) -> None:
        """Make the first signal from now on only set `asked`, which the run looks at after each step."""
        self._begun = True

    @staticmethod
    def ignore() -> None:
        """Ignore SIGTERM and SIGINT until the process has ended. Python removes its handlers before torch finishes its
        own exit, which takes a second."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True
        if not self._begun:
            raise Stopped

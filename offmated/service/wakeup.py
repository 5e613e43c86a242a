"""What ends the main thread's sleep early: a signal, or another thread with news."""

from __future__ import annotations

import select
import signal
import socket
from contextlib import suppress


class WakeupPipe:
    """A socket pair. Unlike `threading.Event` it has no lock, on which a signal handler that interrupts another, or the
    sleep itself, would hang for ever."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake_at_signals(self) -> None:
        """Wake at each signal that has a Python handler. Only for the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the sleep there is, or the next."""
        with suppress(BlockingIOError):  # full of what nobody has read yet: one more says nothing new
            self._writer.send(b"\0")

    def sleep(self, longest_s: float) -> None:
        """Sleep until it is woken, or has been since the last time, at most `longest_s`."""
        select.select([self._reader], [], [], longest_s)
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

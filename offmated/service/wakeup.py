"""Lets a signal or another thread end the main thread's sleep early."""

from __future__ import annotations

import select
import signal
import socket
from contextlib import suppress


class WakeupPipe:
    """Lets a thread sleep until another thread or a signal wakes it; made of a socket pair. Unlike `threading.Event` it
    has no lock: on a lock, a signal handler that interrupts another handler, or the sleep itself, would hang for
    ever."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake_at_signals(self) -> None:
        """Make each signal that has a Python handler end the sleep. Only for the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the sleep in progress or, if there is none, the next one."""
        with suppress(BlockingIOError):  # full of bytes not read yet: one more would change nothing
            self._writer.send(b"\0")

    def sleep(self, longest_s: float) -> None:
        """Sleep until `wake` is called, at most `longest_s` seconds; not at all if it was called since the last
        sleep."""
        select.select([self._reader], [], [], longest_s)
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

"""What the daemon tells systemd, where that has started it (sd_notify(3)); nothing where nobody listens."""

from __future__ import annotations

import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

STOP_PATIENCE_US = 120_000_000  # that systemd goes on waiting after each sign of life while jobs save


class ServiceManager:
    """The socket of `Type=notify` and of `WatchdogSec`. Takes its variables out of the environment: they are for this
    process, not for its children."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        address = environment.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        watchdog_us = environment.pop("WATCHDOG_USEC", "")
        environment.pop("WATCHDOG_PID", None)
        # signs of life come four times as often as systemd needs them
        self._pause_s = int(watchdog_us) / 4e6 if watchdog_us.isdecimal() else 10.0
        self._told = 0.0
        self._stopping = False

    def ready(self) -> None:
        """Jobs and questions are taken now."""
        self._tell("READY=1\nWATCHDOG=1")

    def alive(self) -> None:
        """A sign of life; call it as often as you like. While jobs save at the end it asks for more time, too."""
        if time.monotonic() - self._told >= self._pause_s:
            self._tell("WATCHDOG=1" + f"\nEXTEND_TIMEOUT_USEC={STOP_PATIENCE_US}" * self._stopping)

    def stopping(self) -> None:
        """Jobs save and end from here on."""
        self._stopping = True
        self._tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={STOP_PATIENCE_US}")

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to:
            to.sendto(text.encode(), self._address)

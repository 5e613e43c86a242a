"""Tells systemd how the daemon is, if systemd has started it (sd_notify(3)); otherwise does nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import MutableMapping
from contextlib import suppress

STOP_PATIENCE_US = 120_000_000  # how long systemd goes on waiting after each sign of life while jobs save


class ServiceManager:
    """Sends the daemon's status to systemd (`Type=notify`, `WatchdogSec`), if systemd has started it; otherwise does
    nothing. Removes systemd's variables from `environment`, as they are for this process and not for its children."""

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
        """Tell systemd that the daemon accepts jobs and requests now."""
        self._tell("READY=1\nWATCHDOG=1")

    def alive(self) -> None:
        """Send systemd a sign of life (`WATCHDOG=1`), if one is due; it may be called as often as one likes. While jobs
        save at the end, also ask for more time."""
        if time.monotonic() - self._told >= self._pause_s:
            self._tell("WATCHDOG=1" + f"\nEXTEND_TIMEOUT_USEC={STOP_PATIENCE_US}" * self._stopping)

    def stopping(self) -> None:
        """Tell systemd that the daemon is ending: jobs save a checkpoint and end from now on."""
        self._stopping = True
        self._tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={STOP_PATIENCE_US}")

    def _tell(self, text: str) -> None:
        self._told = time.monotonic()
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to:
            to.sendto(text.encode(), self._address)

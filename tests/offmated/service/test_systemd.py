"""A daemon that systemd has started: it says that it is ready, lives, and stops; its children say nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from offmated.cli.client import Client
from offmated.service.systemd import STOP_PATIENCE_US, ServiceManager
from tests.support.daemons import PATIENCE_S, ROOT, until
from tests.support.desks import short_paths

EXTENDED = f"EXTEND_TIMEOUT_USEC={STOP_PATIENCE_US}"


def heard(listener: socket.socket) -> list[str]:
    """All messages that have come."""
    found = []
    while True:
        try:
            found.append(listener.recv(4096).decode())
        except BlockingIOError:
            return found


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    listener.bind(path)
    return listener


def test_a_daemon_tells_its_service_manager_how_it_is() -> None:
    with short_paths() as paths, listening(str(paths.state.parent / "notify")) as listener:
        paths.create()
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "offmated"],
            cwd=paths.state,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                **paths.environment(),
                "PYTHONPATH": str(ROOT),
                "WATCHDOG_USEC": "2000000",
                "NOTIFY_SOCKET": str(paths.state.parent / "notify"),
                "WATCHDOG_PID": "1",
            },
        )
        try:
            said: list[str] = []
            until(lambda: said.extend(heard(listener)) or said[-1:] == ["WATCHDOG=1"], "a sign of life", PATIENCE_S)
            assert said[0] == "READY=1\nWATCHDOG=1"
            health = Client(paths).health()
            for child in health["children"].values():
                variables = Path(f"/proc/{child['pid']}/environ").read_bytes().split(b"\0")
                assert not [name for name in variables if name.startswith((b"NOTIFY_SOCKET", b"WATCHDOG_"))]
        finally:
            daemon.terminate()
            assert daemon.wait(PATIENCE_S) == 0
        assert f"STOPPING=1\n{EXTENDED}" in heard(listener)


def test_signs_of_life_come_often_enough_and_no_oftener(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    name = f"offmate-test-{os.getpid()}"
    environment = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1", "OTHER": "stays"}
    with listening(f"\0{name}") as listener:
        manager = ServiceManager(environment)
        assert environment == {"OTHER": "stays"}
        manager.ready()
        manager.alive()
        now += 1.0
        manager.alive()
        manager.stopping()
        now += 1.0
        manager.alive()
        expected = ["READY=1\nWATCHDOG=1", "WATCHDOG=1", f"STOPPING=1\n{EXTENDED}", f"WATCHDOG=1\n{EXTENDED}"]
        assert heard(listener) == expected


def test_where_nobody_listens_nothing_is_wrong() -> None:
    for environment in ({}, {"NOTIFY_SOCKET": "/nowhere/at/all"}, {"WATCHDOG_USEC": "soon"}):
        manager = ServiceManager(environment)
        manager.ready()
        manager.stopping()
        assert environment == {}

"""A command meets a daemon that starts, stops, hangs or is not there."""

from __future__ import annotations

import io
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from rich.console import Console

from offmated.cli import client as client_module
from offmated.cli import launcher
from offmated.cli.client import Client
from offmated.cli.follow import events, follow
from offmated.cli.launcher import start_in_background
from offmated.paths import Paths
from planner.errors import Exit, UserError
from tests.support.daemons import HELD_AT, PATIENCE_S, ROOT, House, until


def test_up_waits_for_a_daemon_that_is_stopping_and_starts_the_next(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = own.submit("stubborn", steps=5000)  # its trainer stops when it is let go
    own.wait_for_step(number, 2)
    monkeypatch.setenv("PYTHONPATH", own.environment["PYTHONPATH"])
    assert own.daemon is not None
    own.client.shutdown(wait=False)
    assert own.client.health()["state"] == "stopping"
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(start_in_background, own.paths)
        own.release(number)
        assert started.result() is True
    assert own.daemon.wait(PATIENCE_S) == 0
    health = own.client.health()
    assert (health["state"], health["pid"] != own.daemon.pid) == ("running", True)
    own.client.cancel(number)
    own.wait_for(number, "cancelled")
    own.client.shutdown()


def test_a_daemon_that_hangs_without_a_socket_is_named(own: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "OTHER_PATIENCE_S", 0.5)
    monkeypatch.setenv("PYTHONPATH", own.environment["PYTHONPATH"])
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGSTOP)
    own.paths.api_socket.unlink()
    for reach in (start_in_background, launcher.runs):
        with pytest.raises(UserError) as caught:
            reach(own.paths)
        assert caught.value.code == "daemon-silent"
        assert caught.value.numbers[0] == f"process {own.daemon.pid}, socket {own.paths.api_socket}"
        assert f"kill {own.daemon.pid}, then offmate up" in caught.value.hint
    own.daemon.send_signal(signal.SIGCONT)
    monkeypatch.undo()
    assert launcher.runs(own.paths), "it listens anew"


def test_a_daemon_that_hangs_is_not_called_away_and_nothing_is_told_twice(
    own: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = own.submit("held", steps=100)
    own.wait_until_held(number)
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    told = events(Client(own.paths), number, following=True)
    assert any(event.get("step") == HELD_AT for event in told)
    assert own.daemon is not None
    own.daemon.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match="daemon-silent"):
        next(told)
    with pytest.raises(UserError) as caught:
        Client(own.paths).running()
    own.daemon.send_signal(signal.SIGCONT)
    assert (caught.value.code, caught.value.numbers[1]) == ("daemon-silent", "no answer within 0.5 s")
    monkeypatch.undo()
    until(Client(own.paths).running, "it answers again")


def test_following_goes_on_after_a_daemon_that_did_not_answer(own: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    daemon, number = own.daemon, own.submit("followed", steps=50)
    assert daemon is not None
    daemon.send_signal(signal.SIGSTOP)
    waker = threading.Timer(1.5, daemon.send_signal, (signal.SIGCONT,))
    waker.start()
    assert follow(Client(own.paths), number, Console(file=io.StringIO()))["state"] == "done"
    waker.join()


def test_a_daemon_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        paths.config.write_text("redis_ulr = 'redis://localhost'\n")
        with pytest.raises(UserError) as caught:
            start_in_background(paths)
        assert str(caught.value) == (
            "The daemon did not start.\n"
            "  it ended with exit code 2\n"
            "  The settings file cannot be used.\n"
            f"    {paths.config}\n"
            "    unknown key redis_ulr\n"
            "    hint: did you mean redis_url?   [bad-config]\n"
            f"  hint: the log is {paths.log}   [daemon-did-not-start]"
        )


def test_a_log_that_has_grown_long_is_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LOG_BYTES", 10)
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        paths.config.write_text("redis_ulr = 'redis://localhost'\n")
        paths.log.write_text("a long story\n")
        with pytest.raises(UserError):
            start_in_background(paths)
        assert (Path(home) / "daemon.log.1").read_text() == "a long story\n"
        assert "a long story" not in paths.log.read_text()


def test_two_starts_at_once_give_one_daemon_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="offmate-", dir="/tmp") as home:
        paths = Paths.at(Path(home))
        together = Barrier(2)

        def start(_: int) -> bool:
            together.wait()
            return start_in_background(paths)

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(start, range(2))) == [True, True]
        until(lambda: "[already-running]" in paths.log.read_text(), "the later one gives way")
        Client(paths).shutdown()
        assert not Client(paths).running()


def test_nobody_answering_is_said_with_the_command_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(Client(Paths.at(tmp_path)).jobs())
    assert caught.value.exit_code is Exit.DAEMON_NOT_RUNNING
    assert str(caught.value).startswith("The daemon is not running.\n  socket ")
    assert str(caught.value).endswith("\n  hint: offmate up   [daemon-not-running]")

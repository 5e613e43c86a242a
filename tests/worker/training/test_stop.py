"""Requests to stop, seen from outside a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BEGUN = """
import time
from worker.training.stop import StopRequest
stop = StopRequest()
stop.install()
stop.begin()
print("ready", flush=True)
while not stop.asked:
    time.sleep(0.005)
print("asked", flush=True)
while True:
    time.sleep(0.005)
"""

OVER = """
import ctypes
from worker.training.stop import StopRequest
stop = StopRequest()
stop.install()
stop.begin()
stop.ignore()
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.pause, None, None)
print("ready", flush=True)
"""

STARTING = """
import time
from worker.training.stop import Stopped, StopRequest
stop = StopRequest()
stop.install()
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.005)
except Stopped:
    print("stopped", flush=True)
"""


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_first_request_waits_for_the_step_and_the_second_ends_the_process() -> None:
    with start(BEGUN) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "asked\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_a_request_while_there_is_nothing_to_save_stops_at_once() -> None:
    with start(STARTING) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(60) == 0


def test_no_request_is_heard_once_all_is_done_not_even_behind_pythons_end() -> None:
    with start(OVER) as process:
        for _ in range(10):
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        process.kill()

"""What wakes the daemon's main thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from offmated.service.wakeup import WakeupPipe

LONG_S = 60.0

SHOWER_OF_SIGNALS = """
import os, signal, threading
from offmated.service.wakeup import WakeupPipe
pipe = WakeupPipe()
count = 0
def handler(*_):
    global count
    count += 1
for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
    signal.signal(number, handler)
pipe.wake_at_signals()
def shower():
    for _ in range(3000):
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
            os.kill(os.getpid(), number)
        pipe.wake()
thread = threading.Thread(target=shower)
thread.start()
while thread.is_alive():
    pipe.sleep(0.01)
print(count > 0)
"""


def test_a_ring_from_another_thread_ends_the_sleep() -> None:
    pipe = WakeupPipe()
    started = time.monotonic()
    thread = threading.Thread(target=pipe.wake)
    thread.start()
    pipe.sleep(LONG_S)
    thread.join()
    assert time.monotonic() - started < LONG_S / 2


def test_rings_before_the_sleep_are_heard_once_however_many() -> None:
    pipe = WakeupPipe()
    for _ in range(100_000):  # more than fit
        pipe.wake()
    started = time.monotonic()
    pipe.sleep(LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    started = time.monotonic()
    pipe.sleep(0.05)
    assert time.monotonic() - started >= 0.04


def test_signals_upon_signals_do_not_hang_the_sleeper() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOWER_OF_SIGNALS], capture_output=True, text=True, timeout=LONG_S, check=True
    )
    assert done.stdout == "True\n"


def test_a_signal_ends_the_sleep() -> None:
    program = (
        "import os, signal, threading\n"
        "from offmated.service.wakeup import WakeupPipe\n"
        "pipe = WakeupPipe()\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "pipe.wake_at_signals()\n"
        "threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        f"pipe.sleep({10 * LONG_S})\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=LONG_S, check=True)

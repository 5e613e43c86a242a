"""Signals that end a process by leaving its contexts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from planner.run.ending import leaving_on_signals

PROGRAM = """
import os, signal, time, weakref
from planner.run.ending import leaving_on_signals
class Anything:
    pass
with leaving_on_signals():
    one = Anything()
    end = weakref.ref(one, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    try:
        del one
        time.sleep(60)
    finally:
        print("tidied", flush=True)
"""


def test_a_signal_that_comes_as_an_object_is_removed_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "tidied\n", "")


def test_a_library_that_makes_an_error_of_its_own_of_the_exception_still_leaves() -> None:
    with pytest.raises(SystemExit) as left, leaving_on_signals():
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException:
            raise TypeError("incompatible function arguments") from None
    assert left.value.code == 130
    with pytest.raises(TypeError, match="its own"), leaving_on_signals():
        raise TypeError("its own")

"""Bounds of a process that looks at somebody's files."""

from __future__ import annotations

import signal
import subprocess
import sys

from planner.run.bounds import ended_by

PROGRAM = """
import resource, time
from planner.run import bounds
bounds.MOST_S, bounds.MOST_BYTES = 1, 2**28
before = [resource.getrlimit(which) for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA)]
with bounds.bounded():
    try:
        bytearray(2**29)
    except MemoryError:
        print("no memory", flush=True)
with bounds.bounded(memory=False):
    bytearray(2**29)
assert before == [resource.getrlimit(which) for which in (resource.RLIMIT_CPU, resource.RLIMIT_DATA)]
kept = bytearray(2**29)  # what there was before is not what is looked at
with bounds.bounded():
    bytearray(2**27)
print("as before", flush=True)
with bounds.bounded(things=3):
    end = time.process_time() + 2
    while time.process_time() < end:
        pass
print("each has its time", flush=True)
with bounds.bounded():
    while True:
        pass
"""


def test_what_is_beyond_the_bounds_is_a_memory_error_or_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "no memory\nas before\neach has its time\n", done.stderr
    assert done.returncode == -signal.SIGXCPU
    told = ended_by(-done.returncode, "the dataset /data/a.parquet")
    assert told is not None and str(told) == (
        "Reading the dataset /data/a.parquet takes too much time or memory.\n  more than 30 s of the processor's time\n"
        "  hint: a small file may unpack to gigabytes: write it anew in smaller parts, or leave it out"
        "   [takes-too-much]"
    )
    assert ended_by(signal.SIGTERM, "the data") is None
    by_kernel, by_somebody = (ended_by(signal.SIGKILL, "the data", kernel_kills=kills) for kills in (True, False))
    assert by_kernel is not None and by_kernel.code == "look-killed" and by_kernel.numbers[0].startswith("the kernel")
    assert by_somebody is not None and by_somebody.numbers[0].startswith("who sent the signal is not known")

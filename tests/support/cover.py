"""Chooses what `make test` runs: the owners of promises, and of other tests those that run most lines in least time.

    python -m tests.support.cover [--minutes 5] [--workers 3] [--data FOLDER]

All tests run once under coverage, every test in a context of its own, with the processes that it starts; that
takes about an hour. Then tests are taken until the minutes are used: the owners in tests/promises.toml, then greedily
the one that runs most lines which no other runs yet, by its seconds, until nearly all are run, then the cheapest. What
is left is written to tests/selection.toml. `--data FOLDER`: choose from what an earlier run has left there.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import operator
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.selection import Selection, owners

PACKAGES = ("offmate", "offmated", "planner", "worker")
NEARLY_ALL = 0.95
"""Share of the lines to run before the cheapest tests are taken. The last few lines take as long as all the others."""
_RC = """
[run]
source = {packages}
data_file = {folder}/data
parallel = true
context = ${{COVER_CONTEXT-start}}
patch = _exit
sigterm = true
"""


# ---- in the processes that run tests


class _Told:
    """Has coverage know which test runs, and writes down the seconds of each."""

    def __init__(self, folder: Path) -> None:
        self._times = (folder / f"times-{os.getpid()}.jsonl").open("a", buffering=1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """In a context of its own, which processes that it starts have, too."""
        from coverage import Coverage

        measuring = Coverage.current()
        assert measuring is not None
        os.environ["COVER_CONTEXT"] = item.nodeid
        measuring.switch_context(item.nodeid)
        begin = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - begin
            self._times.write(json.dumps([item.nodeid, round(seconds, 3)]) + "\n")
            measuring.switch_context("between")


def pytest_configure(config: pytest.Config) -> None:
    """For workers of xdist, and the process that has the emulated device: not for the one that hands tests out."""
    folder = os.environ.get("COVER_FOLDER")
    if folder is not None and not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_Told(Path(folder)))


def measure(folder: Path, workers: int) -> None:
    """Run all tests; what each runs, and its seconds, are in `folder` then. A test that fails counts, too."""
    if find_spec("coverage") is None:
        sys.exit("coverage is not installed.  hint: .venv/bin/pip install coverage")
    settings = folder / "coverage.ini"
    packages = ",".join(str(ROOT / name) for name in PACKAGES)
    settings.write_text(_RC.format(packages=packages, folder=folder))
    # The file that coverage has put among the installed packages begins it in every process that has this variable.
    env = {**os.environ, "COVERAGE_PROCESS_START": str(settings), "COVER_FOLDER": str(folder)}
    env["PYTEST_PLUGINS"] = "tests.support.cover"
    words = ["-n", str(workers), "--dist", "loadfile", "-p", "no:cacheprovider", "--tb", "short"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=env, check=False)


# ---- afterwards


def _times(folder: Path) -> dict[str, float]:
    """Test -> its seconds. What ran on the emulated device is told twice: by who asked, and by who did it."""
    found = dict[str, float]()
    for path in folder.glob("times-*.jsonl"):
        for line in path.read_text().splitlines():
            name, seconds = json.loads(line)
            found[name] = max(found.get(name, 0.0), seconds)
    return found


def _lines(folder: Path) -> dict[str, int]:
    """Test -> the lines that it has run, each a bit of a number. What runs as modules are imported is nobody's."""
    from coverage.numbits import numbits_to_nums

    numbers, found = dict[tuple[str, int], int](), defaultdict[str, int](int)
    for path in sorted(folder.glob("data.*")):
        with sqlite3.connect(path) as data:
            try:
                rows = data.execute(
                    "select file.path, context.context, line_bits.numbits from line_bits"
                    " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
                ).fetchall()
            except sqlite3.DatabaseError:  # its process was killed as it wrote
                continue
        for name, context, packed in rows:
            lines = numbits_to_nums(packed)
            module = next((name[at:] for part in PACKAGES if (at := name.rfind(f"/{part}/")) >= 0), "")
            if module and lines:
                start, _, test = context.partition("|")  # of a process, and of what it ran
                bits = [numbers.setdefault((module, line), len(numbers)) for line in lines]
                its = bytearray(max(bits) // 8 + 1)
                for bit in bits:
                    its[bit // 8] |= 1 << bit % 8
                found[test or start] |= int.from_bytes(its, "little")
    return found


def choose(lines: dict[str, int], seconds: dict[str, float], kept: set[str], budget_s: float) -> set[str]:
    """Of the tests in `seconds` those to take: `kept`, then the best by lines that are new a second, until nearly all
    are run that any test runs, then the cheapest; none that is beyond `budget_s` in all, but for `kept`."""
    covered = lines.get("start", 0) | lines.get("between", 0) | lines.get("", 0)
    everything = functools.reduce(operator.or_, lines.values(), 0)
    enough = NEARLY_ALL * everything.bit_count()
    taken, used = set[str](), 0.0

    def take(name: str) -> None:
        nonlocal covered, used
        taken.add(name)
        covered |= lines.get(name, 0)
        used += seconds[name]

    for name in kept & seconds.keys():
        take(name)

    def worth(name: str) -> float:
        return (lines.get(name, 0) & ~covered).bit_count() / (seconds[name] + 0.01)

    queue = [(-worth(name), name) for name in sorted(seconds.keys() - taken)]
    heapq.heapify(queue)
    while queue and covered.bit_count() < enough:
        said, name = heapq.heappop(queue)
        now = worth(name)
        if now == 0:
            continue
        if now < -said:  # another has run some of its lines since
            heapq.heappush(queue, (-now, name))
        elif used + seconds[name] <= budget_s:
            take(name)
    for name in sorted(seconds.keys() - taken, key=lambda name: (seconds[name], name)):
        if used + seconds[name] > budget_s:
            break
        take(name)
    print(f"{len(taken)} of {len(seconds)} tests, {used:.0f} of {sum(seconds.values()):.0f} s", end=", ")
    print(f"{covered.bit_count()} of the {everything.bit_count()} lines that any test runs")
    return taken


def main() -> None:
    """Measure, choose, and write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of clock, for the chosen tests")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--slower", type=float, default=1.1, help="how much longer a test takes under coverage")
    parser.add_argument("--data", type=Path, help="the folder of an earlier run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="offmate-cover-") as name:
        folder = given.data or Path(name)
        if given.data is None:
            measure(folder, given.workers)
        seconds = _times(folder)
        kept = {test for test in seconds for owner in owners() if test == owner or test.partition("[")[0] == owner}
        taken = choose(_lines(folder), seconds, kept, 60 * given.minutes * given.workers * given.slower)
    Selection.of(seconds, taken).write()


if __name__ == "__main__":
    main()

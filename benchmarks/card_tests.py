"""The tests that need a card, run in this process: what has passed and failed is written after each."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

FILES = (
    "tests/worker/runtime/test_cuda.py",
    "tests/planner/graph/test_tangents.py",
    "tests/planner/graph/test_inductor.py",
    "tests/planner/graph/test_loss_by_rows.py",
)
"""Those with tests marked `gpu`: others may need packages that a machine with a card, lent for minutes, lacks."""
_ROOT = Path(__file__).resolve().parent.parent


class _Told:
    """Of each test its outcome and seconds, in a file at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed = list[str]()
        self._failed, self._skipped = dict[str, str](), dict[str, str]()
        self._seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = round(self._seconds[report.nodeid] + report.duration, 2)
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext[-2000:]
        elif report.skipped:
            self._skipped[report.nodeid] = str(report.longrepr)[-200:]
        elif report.when == "call":
            self._passed.append(report.nodeid)
        if report.when == "teardown":
            found = {"passed": self._passed, "failed": self._failed, "skipped": self._skipped, "seconds": self._seconds}
            self._path.write_text(json.dumps(found), "utf-8")


def run_tests(path: Path) -> int:
    """Run them; pytest's exit code. The outcomes go to `path`."""
    words = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", f"--rootdir={_ROOT}"]
    return int(pytest.main([*words, *(str(_ROOT / name) for name in FILES)], plugins=[_Told(path)]))

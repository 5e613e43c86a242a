"""Tests that need the emulated device run in a process that has it, one process for a test session."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import socket
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.cuda import build

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tests.support.cuda.device import Device

device: Device | None = None
"""The one of this process; None where it has none."""


class Client:
    """The session's side: sends the marked tests over."""

    def __init__(self, modules: list[str]) -> None:
        """`modules`: the files of all marked tests."""
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.support.cuda", "--serve", str(theirs.fileno())]
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *options, *self._modules], cwd=ROOT, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
            )
        self._lines = ours.makefile("rw", encoding="utf-8")
        ours.close()

    def run(self, nodeid: str) -> None:
        """Run a test over there. Raises what pytest raises for a failure or a skip."""
        __tracebackhide__ = True
        if self._process is None:
            self._start()
        answer = ""
        with contextlib.suppress(OSError):
            print(nodeid, file=self._lines, flush=True)
            answer = self._lines.readline()
        if not answer:
            code = self.close()
            pytest.fail(f"the process with the emulated device ended with exit code {code}", pytrace=False)
        outcome, text = json.loads(answer)
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)

    def close(self) -> int | None:
        """End the process; its exit code."""
        if self._process is None:
            return None
        self._lines.close()
        process, self._process = self._process, None
        return process.wait()


class Server:
    """The other side: a pytest session that runs what it is told."""

    def __init__(self, number: int) -> None:
        self._lines = socket.socket(fileno=number).makefile("rw", encoding="utf-8")
        self._outcome = "passed", ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._lines:
            self._outcome = "passed", ""
            item = items.get(line.rstrip("\n"))
            if item is None:
                self._outcome = "failed", f"not collected in the process with the emulated device: {line}"
            else:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            print(json.dumps(self._outcome), file=self._lines, flush=True)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            print(report.longrepr, file=sys.stderr)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed or self._outcome[0] == "failed":
            return
        if report.skipped and isinstance(report.longrepr, tuple):
            self._outcome = "skipped", report.longrepr[2]
        else:
            output = [f"\n---- {title} ----\n{text}" for title, text in report.sections]
            self._outcome = "failed", "\n".join([f"({report.when}) {report.longreprtext}", *output])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have marked tests run over there, or skipped with the reason why they cannot."""
    marked = [item for item in items if _needs_it(item)]
    if device is not None:
        return
    reason = build.missing()
    client = Client(sorted({str(item.path) for item in marked}))
    if marked and reason is None:
        config.add_cleanup(client.close)
    for item in marked:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
            continue
        item.setup = lambda: None  # type: ignore[method-assign]
        item.runtest = functools.partial(client.run, item.nodeid)  # type: ignore[method-assign]


def _needs_it(item: pytest.Item) -> bool:
    gpu = item.get_closest_marker("gpu")
    if gpu is None:
        return item.get_closest_marker("emulated") is not None
    import torch

    real = torch.cuda.is_available() and device is None
    if gpu.kwargs.get("real") and not real:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        return False
    return not real


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test finds the device as new, but for memory that is in use."""
    if device is not None:
        gc.collect()
        device.rest()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Nothing may have gone wrong there unseen."""
    if device is not None and device.queues.error is None:
        device.queues.finish()
        device.queues.check()


def the_device() -> Device:
    """This process's."""
    assert device is not None, "only tests marked `emulated` or `gpu` have a device"
    return device

"""A real browser for tests, driven over its debugging pipe: open a page, move the mouse, ask its scripts."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads commands from descriptor 3 and answers on 4.
_LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The first browser of the machine that these tests can drive."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended with the block."""
    with tempfile.TemporaryDirectory(prefix="offmate-browser-", ignore_cleanup_errors=True) as profile:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(to_read), str(from_write), path, *_QUIET]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"], pass_fds=(to_read, from_write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(to_write, from_read)
        finally:
            os.close(to_write)
            process.kill()
            process.wait()
            os.close(from_read)


class Browser:
    """One page in a browser. `problems` collects uncaught errors and console errors; `requests` every address asked."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.buffer = b""
        self.numbers = itertools.count(1)
        self.session = ""
        self.loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path | str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Show a file or an address in a window of this size, and wait until it is loaded and drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.requests.clear()
        self._call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        deadline = time.monotonic() + 60
        while not self.loaded:
            self._handle(self._read(deadline))
        self.frame()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def frame(self) -> None:
        """Wait until everything asked for so far is drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """One event: mouseMoved, mousePressed, mouseReleased or mouseWheel."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def photograph(self, file: Path, *, whole: bool = False) -> None:
        """A PNG of the window, or of the whole page."""
        picture = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        deadline = time.monotonic() + 60
        while True:
            answer = self._read(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._handle(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise AssertionError("the browser does not answer")
            piece = os.read(self.answers, 1 << 20)
            if not piece:
                raise AssertionError("the browser has ended")
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _handle(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

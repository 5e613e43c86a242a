"""A real browser for tests, by Playwright with the system's Chromium: open a page, use the mouse, ask its scripts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000


def find_browser() -> str | None:
    """The first browser of the machine that these tests can drive."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A browser with an empty profile, ended with the block."""
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--hide-scrollbars"])
        try:
            page = started.new_page()
            page.set_default_timeout(PATIENCE_MS)
            yield Browser(page)
        finally:
            started.close()


class Browser:
    """One page in a browser. `problems` collects uncaught errors and console errors; `requests` every address asked."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, page: Path | str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Show a file or an address in a window of this size, and wait until it is loaded and drawn."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.requests.clear()
        self.page.goto(page if isinstance(page, str) else page.absolute().as_uri())
        self.frame()

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        return self.page.evaluate(expression)

    def frame(self) -> None:
        """Wait until everything asked for so far is drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def point(self, x: float, y: float) -> None:
        """The mouse moves there."""
        self.page.mouse.move(x, y)
        self.frame()

    def drag(self, x: float, y: float, *, by: float) -> None:
        """The mouse moves there, and `by` pixels to the right with its button held down."""
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + by, y)
        self.page.mouse.up()
        self.frame()

    def wheel(self, x: float, y: float, by: float, *, control: bool = False) -> None:
        """The mouse's wheel is turned there, `by` pixels down."""
        self.page.mouse.move(x, y)
        if control:
            self.page.keyboard.down("Control")
        self.page.mouse.wheel(0, by)
        if control:
            self.page.keyboard.up("Control")
        self.frame()

    def photograph(self, file: Path, *, whole: bool = False, part: str | None = None) -> None:
        """A PNG of the window, of the whole page, or of the element that this selector finds."""
        if part is not None:
            self.page.locator(part).screenshot(path=file)
        else:
            self.page.screenshot(path=file, full_page=whole)

"""Draws docs/images/page.png from jobs that a daemon really trains: python -m tests.support.page_picture (minutes)"""

from __future__ import annotations

import runpy
from pathlib import Path

from tests import ROOT
from tests.support.browser import browser, find_browser
from tests.support.daemons import House, house

PICTURE = ROOT / "docs" / "images" / "page.png"
EVALUATED = "val_size: 0.05\neval_steps: 10\n"
STEPS, SHOWN_AT = 120, 85


def submit(built: House, name: str, steps: int, more: str = "") -> int:
    """Hand in the example's job under another name and length; its number."""
    lines = (ROOT / "examples" / "pydoc.yaml").read_text().splitlines()
    kept = [line for line in lines if line and not line.startswith(("#", "run_name", "max_steps"))]
    text = "\n".join(kept) + f"\nrun_name: {name}\nmax_steps: {steps}\n{more}"
    return int(built.client.submit(text, str(built.home / "examples"))["id"])


def draw(file: Path) -> None:
    """A job that is done, one that runs and two that wait, as a person sees them."""
    found = find_browser()
    assert found is not None, "no browser here: sudo apt install chromium"
    with house(real=True) as built, browser(found) as window:
        (built.home / "examples").mkdir()
        runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](built.home / ".demo" / "pydoc")
        built.wait_for(submit(built, "pydoc-short", 10), "done")
        number = submit(built, "pydoc", STEPS, EVALUATED)
        submit(built, "pydoc-evaluated", STEPS, EVALUATED)
        submit(built, "pydoc-long", 2 * STEPS)
        built.wait_for_step(number, SHOWN_AT)
        window.open(built.client.page_url(), width=1280)
        window.page.wait_for_selector("#job:not([hidden])")
        window.page.click("#log summary")
        window.page.wait_for_selector(f"#log pre >> text=/{STEPS}")
        window.photograph(file, whole=True)


if __name__ == "__main__":
    draw(PICTURE)

"""Draws docs/images/page.png and docs/images/compare.png from jobs that a daemon really trains:
python -m tests.support.page_picture (minutes)"""

from __future__ import annotations

import runpy
from pathlib import Path

from tests import ROOT
from tests.support.browser import browser, find_browser
from tests.support.daemons import House, house

IMAGES = ROOT / "docs" / "images"
EVALUATED = "val_size: 0.05\neval_steps: 10\n"
RATES = ("1e-4", "3e-4", "1e-3")
STEPS, SHOWN_AT, COMPARED = 120, 85, 60


def submit(built: House, name: str, steps: int, more: str = "") -> int:
    """Hand in the example's job under another name and length; its number."""
    own = ("#", "run_name", "max_steps", *(line.partition(":")[0] for line in more.splitlines()))
    lines = (ROOT / "examples" / "pydoc.yaml").read_text().splitlines()
    kept = [line for line in lines if line and not line.startswith(own)]
    text = "\n".join(kept) + f"\nrun_name: {name}\nmax_steps: {steps}\n{more}"
    return int(built.client.submit(text, str(built.home / "examples"))["id"])


def draw(folder: Path) -> None:
    """Jobs that are done, one that runs and two that wait, as a person sees them; and the comparison of those that are
    done."""
    found = find_browser()
    assert found is not None, "no browser here: sudo apt install chromium"
    with house(real=True) as built, browser(found) as window:
        (built.home / "examples").mkdir()
        runpy.run_path(str(ROOT / "examples" / "pydoc.py"))["prepare"](built.home / ".demo" / "pydoc")
        done = [submit(built, f"rate-{rate}", COMPARED, f"{EVALUATED}learning_rate: {rate}\n") for rate in RATES]
        number = submit(built, "pydoc", STEPS, EVALUATED)
        submit(built, "pydoc-evaluated", STEPS, EVALUATED)
        submit(built, "pydoc-long", 2 * STEPS)
        for one in done:
            built.wait_for(one, "done")
        built.wait_for_step(number, SHOWN_AT)
        window.open(built.client.page_url(), width=1280)
        window.page.wait_for_selector(f"#title >> text={number} · ")
        window.photograph(folder / "page.png", whole=True)
        for one, rate in zip(done, RATES, strict=True):
            window.page.get_by_label(f"Compare {one} · rate-{rate}").check()
        window.page.wait_for_selector(f"#compare .u-label >> text=rate-{RATES[-1]}, evaluation")
        window.frame()
        window.photograph(folder / "compare.png", part="#compare")


if __name__ == "__main__":
    draw(IMAGES)

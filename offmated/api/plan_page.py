"""Draws a job's plan as a page for the browser, in a process of the planner."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from starlette.exceptions import HTTPException

from planner.errors import Exit, UserError
from planner.run.folder import RunFolder

PATIENCE_S = 60.0
#: The page contains its own scripts; whatever the names in a plan say, they can reach nothing else.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; sandbox allow-scripts allow-downloads",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_one_at_a_time = threading.Lock()  # each page takes a process, and a thread that waits for it


def draw(run: RunFolder, job_id: int, title: str) -> bytes:
    """The HTML page that shows the plan of `run`, drawn in a process of the planner. Raises UserError where there is no
    plan yet, or where it cannot be drawn, and HTTPException 503 while another page is being drawn."""
    if not run.plan.exists():
        raise UserError(
            f"Job {job_id} has no plan yet.", code="no-plan", hint=f"offmate show {job_id}", exit_code=Exit.FAILED
        )
    if not _one_at_a_time.acquire(blocking=False):
        raise HTTPException(503, "another plan is being drawn", headers={"Retry-After": "1"})
    try:
        return _drawn(run, job_id, title)
    finally:
        _one_at_a_time.release()


def _drawn(run: RunFolder, job_id: int, title: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="offmate-") as folder:
        page = Path(folder) / "plan.html"
        drawing = ["picture", str(run.plan), f"--title={title}", f"--html={page}"]
        command = [sys.executable, "-P", "-m", "planner", *drawing]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise _not_drawn(job_id, f"it was not there after {PATIENCE_S:g} s") from None
        if done.returncode != 0 or not page.exists():
            raise _not_drawn(job_id, *(done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-3:])
        return page.read_bytes()


def _not_drawn(job_id: int, *why: str) -> UserError:
    return UserError(
        f"The plan of job {job_id} cannot be drawn.", numbers=why, code="no-picture", hint=f"offmate show {job_id}"
    )

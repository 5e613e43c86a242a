"""Draws plans as pictures for `--trace` and `--html`, in a process of the planner."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import click

from offmated.cli.client import Client
from offmated.cli.remote import only_here
from planner.errors import Exit, UserError
from planner.run.folder import RunFolder

P = ParamSpec("P")
FILE = click.Path(path_type=Path, dir_okay=False)
NAMES = frozenset({"trace", "html"})


def picture_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options `--trace` and `--html` to a command."""

    @click.option("--trace", type=FILE, metavar="FILE", help="Write the plan's timeline for Perfetto.")
    @click.option("--html", type=FILE, metavar="FILE", help="Write the plan as a page for the browser.")
    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        command(*args, **kwargs)

    return wrapped


def draw_plan(client: Client, job: dict[str, Any], trace: Path | None, html: Path | None) -> None:
    """Draw a job's plan to the files `trace` and `html`, as far as they are given. Raises UserError where the job has
    no plan yet, and `click.exceptions.Exit` with the planner's exit code where drawing fails."""
    if trace is None and html is None:
        return
    if client.remote is not None:
        if trace is not None:
            only_here("--trace")
        assert html is not None
        html.write_bytes(client.plan_page(job["id"]))
        return
    plan = RunFolder(Path(job["run_dir"])).plan
    if not plan.exists():
        raise UserError(
            f"Job {job['id']} has no plan yet.", code="no-plan", hint=f"offmate show {job['id']}", exit_code=Exit.FAILED
        )
    wanted = [f"--{name}={path}" for name, path in (("trace", trace), ("html", html)) if path is not None]
    command = [sys.executable, "-P", "-m", "planner", "picture", str(plan), f"--title={job['name']}", *wanted]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise click.exceptions.Exit(done.returncode if done.returncode > 0 else Exit.FAILED)


def drawn(trace: Any, html: Any) -> list[str]:
    """A line for people for each file to which a plan was drawn."""
    lines = [f"The timeline is in {trace}; open it at ui.perfetto.dev"] if trace else []
    return lines + ([f"The plan as a page is in {html}"] if html else [])

"""Defines the commands for a job file that is not in the queue: `import` and `preview`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from offmated.cli.output import change_options, json_option
from planner.units import printable

FILE = click.argument("file", type=click.Path(path_type=Path))


@click.command("import")
@FILE
def import_file(file: Path) -> None:
    """Print a FILE of axolotl, LLaMA-Factory or TRL as a job file of offmate, with a comment on each key."""
    from planner.job.imported import imported
    from planner.keys.source import read_text

    text = imported(read_text(file), file.absolute().parent, file.name)
    click.echo(printable(text) if sys.stdout.isatty() else text, nl=False)


@click.command()
@FILE
@click.option("--rows", type=click.IntRange(min=0), default=3, show_default=True, help="How many rows to show.")
@change_options
@json_option
def preview(file: Path, rows: int, as_json: bool, **changes: Any) -> None:
    """Show what the job in FILE would train on: rows with what is learned, what is cut, tokens and steps."""
    from offmated.cli import planner_process  # late: importing it takes half of a command's start

    form = ["--json"] if as_json else ["--color"] if sys.stdout.isatty() else []
    url = planner_process.database()
    known = [f"--database={url}"] if url else []
    asks = f"--asks=offmate plan {shlex.join([str(file), *_words(changes)])}"
    with planner_process.resolved(planner_process.job_of(file, changes)) as job:
        words = ["preview", str(job), asks, f"--rows={rows}", *form, *known]
        code = planner_process.run_child([sys.executable, "-P", "-m", "worker.check", *words]).returncode
    sys.exit(code)


def _words(changes: dict[str, Any]) -> Iterator[str]:
    """The words of `changes` on a command line."""
    for option, key in (("--gpu-budget", "gpu_budget"), ("--cpu-budget", "cpu_budget")):
        if changes[key] is not None:
            yield from (option, changes[key])
    for setting in changes["settings"]:
        yield from ("--set", setting)

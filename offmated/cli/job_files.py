"""Commands of a job file that is in no queue: in offmate's words, and what it would train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from offmated.cli.planner_process import database

FILE = click.argument("file", type=click.Path(path_type=Path))


@click.command("import")
@FILE
def import_file(file: Path) -> None:
    """Print FILE, of axolotl, LLaMA-Factory or TRL, in offmate's words, with a comment on each key."""
    from planner.job.imported import imported
    from planner.job.source import read_text

    click.echo(imported(read_text(file), file.absolute().parent, file.name), nl=False)


@click.command()
@FILE
@click.option("--rows", type=click.IntRange(min=0), default=3, show_default=True, help="How many rows to show.")
def preview(file: Path, rows: int) -> None:
    """Show what the job in FILE would train on: rows with what is learned, what is cut, tokens, steps and hours."""
    color = ["--color"] if sys.stdout.isatty() else []
    url = database()
    known = [f"--database={url}"] if url else []
    command = [sys.executable, "-P", "-m", "worker.preview", str(file), f"--rows={rows}", *color, *known]
    sys.exit(subprocess.call(command, stdin=subprocess.DEVNULL))

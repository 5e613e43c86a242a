"""Prints what commands say: words and tables for people, whole lines for pipes, JSON for programs."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TextIO, cast

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from offmated.jobs.states import LARGEST_ID
from planner.errors import Exit, UserError
from planner.units import SMALLEST_BUDGET_BYTES, counted, escaped, parse_bytes, printable

P = ParamSpec("P")

UNLIMITED = 100_000  # columns: output into a pipe is never wrapped or cut
COLOURS = {
    "done": "green",
    "running": "cyan",
    "failed": "red",
    "cancelled": "yellow",
    "stopping": "yellow",
    "paused": "yellow",
    "held": "yellow",
    "waiting for room": "yellow",
    "ok": "green",
    "warning": "yellow",
    "problem": "red",
}


class _Screen(Console):
    """A console whose texts can neither control the terminal nor hide anything, since they contain names of jobs, files
    and data."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Render `text` with its control characters made visible, so that it cannot control the terminal."""
        return super().render_str(printable(text), **options)


class _Pipe(io.TextIOBase):
    """A stream that drops the spaces with which tables are padded to their width."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, which Rich gives in whole lines, without the spaces at their ends."""
        return self._stream.write(re.sub(r" +\n", "\n", text))

    def flush(self) -> None:
        """Flush the stream that is written to."""
        self._stream.flush()


def console(*, stderr: bool = False) -> Console:
    """The Rich console for texts to people; plain and without wrapping when the stream is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    if stream.isatty():
        return _Screen(file=stream, highlight=False, markup=False)
    return _Screen(file=cast(TextIO, _Pipe(stream)), width=UNLIMITED, highlight=False, markup=False)


def shorten(text: str, most: int) -> str:
    """`text`, cut to at most `most` characters; an ellipsis shows the cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def say(text: str, *, err: bool = False) -> None:
    """Print a line of text on stdout, or on stderr with `err`, with control characters made visible."""
    click.echo(printable(text), err=err)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print `value` as one JSON document on stdout; on one line if `indent` is None."""
    click.echo(escaped(json.dumps(value, indent=indent, ensure_ascii=False)))


def coloured(state: str) -> Text:
    """A job's state or a check's verdict, as text in its colour."""
    return Text(state, style=COLOURS.get(state, ""))


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table with these column names and rows, without ruling lines, as shell tools expect."""
    lines = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows:
        lines.add_row(*row)
    return lines


def pairs(rows: Sequence[tuple[str, str | Text]], *, width: int = 0) -> Table:
    """A table with a name and its value in each row. `width`: the least width of the names, in columns."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(min_width=width)
    for name, value in rows:
        lines.add_row(Text(name, style="bold"), value)
    return lines


class Size(click.ParamType[str]):
    """The click parameter type of a memory size like 10GiB, which is checked and returned as it was written."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` if it is a memory size, else make the command fail with a message."""
        try:
            count = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not 0 < count < 2**63:
            self.fail(f"not a memory size: {value}", param, ctx)
        if count < SMALLEST_BUDGET_BYTES:
            unit = f": give it with its unit, as {count}GB" if value.strip().isdecimal() else ""
            self.fail(f"{value} is {counted(count, 'byte')}, too few for any job{unit}", param, ctx)
        return value


class JobNumber(click.ParamType[int]):
    """The click parameter type of a job's number. Anything else is refused in one sentence."""

    name = "number"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return `value` as a number if a job may have it, else make the command fail with a message."""
        if not (re.fullmatch("[0-9]{1,10}", value) and 1 <= int(value) <= LARGEST_ID):
            raise UserError(
                f"{printable(value)} is not the number of a job.",
                code="no-job-number",
                exit_code=Exit.USAGE,
                hint="offmate status lists the jobs with their numbers",
            )
        return int(value)


ID = click.argument("job_id", metavar="ID", type=JobNumber())
IDS = click.argument("job_ids", metavar="ID...", type=JobNumber(), nargs=-1, required=True)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def budget_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add the options `--gpu-budget` and `--cpu-budget`, which override the job file, to a command."""

    @click.option(
        "--gpu-budget", type=Size(), metavar="SIZE", help="Overrides the file's gpu_budget; for example 10GiB."
    )
    @click.option("--cpu-budget", type=Size(), metavar="SIZE", help="Overrides the file's cpu_budget.")
    @functools.wraps(command)
    def with_budgets(*args: P.args, **kwargs: P.kwargs) -> None:
        command(*args, **kwargs)

    return with_budgets


def change_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add to a command the options that override the job file: `--gpu-budget`, `--cpu-budget`, and `--set` for any of
    its keys."""

    @budget_options
    @click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Overrides the file's KEY; may be repeated: --set learning_rate=1e-4.",
    )
    @functools.wraps(command)
    def with_changes(*args: P.args, **kwargs: P.kwargs) -> None:
        command(*args, **kwargs)

    return with_changes

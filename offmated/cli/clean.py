"""Defines `offmate clean`, which frees disk space that jobs that are over take."""

from __future__ import annotations

import sys

import click

from offmated.cli.client import Client
from offmated.cli.output import JobNumber, console, json_option, print_json, table
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.units import format_bytes

DAY_S = 86400.0


@click.command()
@click.argument("job_ids", metavar="[ID]...", type=JobNumber(), nargs=-1)
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=7.0,
    show_default=True,
    help="Only jobs that ended at least this many days ago.",
)
@click.option("--unfinished", is_flag=True, help="Also clean jobs that failed or were cancelled.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def clean(job_ids: tuple[int, ...], days: float, unfinished: bool, yes: bool, as_json: bool) -> None:
    """Remove checkpoints and tokenized data of jobs that are done, after saying how much that is. Models, logs and
    numbers stay."""
    client = Client(Paths.from_environment())
    request = {"jobs": list(job_ids), "unfinished": unfinished, "older_s": DAY_S * days}
    freed = client.clean(remove=False, **request)
    if not as_json:
        rows = [(str(job["id"]), job["name"], job["state"], format_bytes(job["bytes"])) for job in freed["jobs"]]
        console().print(table(("ID", "NAME", "STATE", "CHECKPOINTS AND DATA"), rows))
    total = format_bytes(freed["bytes"])
    if freed["jobs"] and not yes:
        if as_json or not sys.stdin.isatty():
            raise UserError(
                f"Nothing was removed: {total} could be.", hint="add --yes", code="not-asked", exit_code=Exit.USAGE
            )
        if not click.confirm(
            f"Remove {total}? Unfinished jobs then start from the beginning"
            if unfinished
            else f"Remove {total}? Models, logs and numbers stay"
        ):
            click.echo("Nothing was removed.")
            return
    freed = client.clean(remove=True, **request) if freed["jobs"] else freed
    print_json(freed) if as_json else click.echo(f"{format_bytes(freed['bytes'])} are free again.")

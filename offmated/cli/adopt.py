"""Defines `offmate adopt`, which makes jobs again of run folders whose database was lost."""

from __future__ import annotations

import sys

import click

from offmated.cli.client import Client
from offmated.cli.output import json_option, print_json
from offmated.paths import Paths

_SHOWN = 5


@click.command()
@click.argument("folders", metavar="[FOLDER]...", nargs=-1)
@json_option
def adopt(folders: tuple[str, ...], as_json: bool) -> None:
    """Make jobs again of run folders that the database does not know; without FOLDER, of all of them. Folders with a
    model become done jobs. Jobs that had not begun are held until offmate release. All others become failed jobs, and
    offmate retry continues from their checkpoints."""
    jobs, left = Client(Paths.from_environment()).adopt(folders)
    for error in left:
        click.echo(str(error), err=True)
    if as_json:
        print_json(jobs)
    else:
        for job in jobs:
            click.echo(f"{job['id']}  {job['standing']}  {job['run_dir']}")
        if not jobs and not left:
            click.echo("Every run folder belongs to a job.")
    if left:
        sys.exit(left[0].exit_code)


def unknown_words(client: Client) -> str:
    """A sentence that names the run folders that no job has; "" where there are none."""
    if not (folders := client.unknown_runs()):
        return ""
    names = ", ".join(folder.rpartition("/")[2] for folder in folders[:_SHOWN])
    more = f" and {len(folders) - _SHOWN} more" if len(folders) > _SHOWN else ""
    return f"The database does not know the run folders {names}{more}: offmate adopt makes them jobs again."

"""`offmate adopt`: jobs whose database was lost."""

from __future__ import annotations

import click

from offmated.cli.client import Client
from offmated.cli.output import json_option, print_json
from offmated.paths import Paths

_SHOWN = 5


@click.command()
@click.argument("folders", metavar="[FOLDER]...", nargs=-1)
@json_option
def adopt(folders: tuple[str, ...], as_json: bool) -> None:
    """Make jobs again of run folders that the database does not know; without FOLDER of all. Those with a model are
    done; the others have failed, and offmate retry goes on from their checkpoints."""
    jobs = Client(Paths.from_environment()).adopt(folders)
    if as_json:
        print_json(jobs)
        return
    for job in jobs:
        click.echo(f"{job['id']}  {job['state']}  {job['run_dir']}")
    if not jobs:
        click.echo("Every run folder is a job's.")


def unknown_words(client: Client) -> str:
    """What to say of run folders that no job has; "" where there are none."""
    if not (found := client.unknown_runs()):
        return ""
    names = ", ".join(folder.rpartition("/")[2] for folder in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"The database does not know the run folders {names}{more}: offmate adopt makes them jobs again."

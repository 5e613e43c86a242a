"""Defines the command line. A command parses, makes one call and prints. Modules that are slow to import are imported
where they are used.

Exit codes: 0 done, 1 the job failed, 2 wrong usage, 3 does not fit, 4 no such job, 69 daemon not running,
130 interrupted. Errors for people go to stderr as text.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from offmated.cli import job_list, job_view, queue_commands
from offmated.cli.adopt import adopt, unknown_words
from offmated.cli.certify import certify, verify_resume
from offmated.cli.clean import clean
from offmated.cli.client import Client, other_version
from offmated.cli.explain import explain
from offmated.cli.finished import export, sample
from offmated.cli.follow import events, follow, hand_in, is_over, log, rehearse
from offmated.cli.init import init
from offmated.cli.job_files import FILE, import_file, preview
from offmated.cli.keys import keys
from offmated.cli.launcher import runs, start_in_background
from offmated.cli.output import ID, IDS, budget_options, change_options, console, json_option, print_json, say
from offmated.cli.pictures import draw_plan, drawn, picture_options
from offmated.cli.plan_command import plan, plans
from offmated.cli.remote import only_here
from offmated.cli.service import service
from offmated.jobs.job_text import read_job
from offmated.jobs.states import JobState
from offmated.paths import Paths
from planner.errors import Exit, UserError, check_linux
from planner.units import parse_bytes, printable

NOT_UNDERSTOOD = (LookupError, TypeError, ValueError, AttributeError)
"""What handling an answer in another form raises; an error of our own may raise it, too."""


class Commands(click.Group):
    """The group of all commands, listed in the order in which people meet them. A UserError of a command is printed and
    sets the exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in the order in which this file defines them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands into the help text, each with the whole first sentence of its help, however
        long."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(limit=1000))
                    for name, command in self.commands.items()
                    if not command.hidden
                ]
            )

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; print its errors as texts and exit with their exit codes."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            odd = error.code in ("daemon-error", "bad-request")
            shown = (other_version(Paths.from_environment()) if odd else None) or error
            click.echo(str(shown), err=True)
            ctx.exit(shown.exit_code)
        except KeyboardInterrupt:
            ctx.exit(Exit.INTERRUPTED)
        except NOT_UNDERSTOOD:
            other = other_version(Paths.from_environment())
            if other is None:
                raise
            click.echo(str(other), err=True)
            ctx.exit(other.exit_code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="offmate")
def main() -> None:
    """Fine-tune language models that are far too large for your GPU. You submit a job and get a model folder."""


main.add_command(init)


@main.command()
@FILE
@change_options
@json_option
def run(file: Path, gpu_budget: str | None, cpu_budget: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """Submit FILE and follow the job to its end, starting a daemon if none runs. Exits with the job's exit code."""
    text, folder = read_job(file, gpu_budget, cpu_budget)
    paths = Paths.from_environment()
    client = Client(paths)
    if client.remote is None:
        start_in_background(paths)
    screen = console(stderr=as_json)
    job = hand_in(client, screen, lambda key: client.submit(text, str(folder), file.name, key=key, settings=settings))
    screen.print(job_view.submitted(job))
    job = follow(client, job["id"], screen)
    print_json(job) if as_json else screen.print(job_view.ended(job))
    sys.exit(job_view.exit_code(job))


@main.command()
@FILE
@change_options
@queue_commands.turn_options
@click.option(
    "--follow/--detach",
    "following",
    default=None,
    help="Follow the job to its tenth step, or return at once. Default: follow on a terminal.",
)
@json_option
def submit(
    file: Path,
    gpu_budget: str | None,
    cpu_budget: str | None,
    settings: tuple[str, ...],
    following: bool | None,
    as_json: bool,
    **turn: Any,
) -> None:
    """Put the job in FILE into the queue and, if the GPU is free, follow its first steps. If the job has ended by then,
    exits with the job's exit code."""
    text, folder = read_job(file, gpu_budget, cpu_budget)
    client = Client(Paths.from_environment())
    screen, when = console(stderr=as_json), queue_commands.turn(turn)
    job = hand_in(
        client, screen, lambda key: client.submit(text, str(folder), file.name, when, key=key, settings=settings)
    )
    if following or (following is None and screen.is_terminal and not as_json):
        job = rehearse(client, job, screen)
        print_json(job) if as_json else screen.print(job_view.rehearsed(job))
        sys.exit(job_view.exit_code(job) if is_over(job) else Exit.DONE)
    print_json(job) if as_json else screen.print(job_view.submitted(job))


for command in (import_file, keys, explain, preview, export, sample, plan, certify, verify_resume):
    main.add_command(command)


@main.command()
@click.option("--all", "everything", is_flag=True, help="List all jobs.")
@click.option("--label", help="Only those with this label.")
@click.option("-w", "--watch", "watching", is_flag=True, help="Refresh the list every two seconds, until Ctrl-C.")
@json_option
def status(everything: bool, label: str | None, watching: bool, as_json: bool) -> None:
    """List the queue, and before it the jobs that ended last."""
    client = Client(Paths.from_environment())
    if watching:
        if as_json:
            raise click.UsageError("give --watch or --json, not both")
        job_list.watch(console(), lambda: job_list.view(job_list.listing(client, everything, label)))
        return
    listing = job_list.listing(client, everything, label)
    print_json(listing.jobs) if as_json else console().print(job_list.view(listing))


@main.command()
@ID
@picture_options
@json_option
def show(job_id: int, trace: Path | None, html: Path | None, as_json: bool) -> None:
    """Show one job: its plan, what was predicted and what was measured, its progress, its error."""
    client = Client(Paths.from_environment())
    job, plan = client.job(job_id), client.plan(job_id)
    draw_plan(client, job, trace, html)
    print_json(job | {"plan_document": plan}) if as_json else console().print(job_view.job(job, plan))
    for line in () if as_json else drawn(trace, html):
        say(line)


@main.command()
@ID
@click.option("-f", "--follow", "following", is_flag=True, help="Keep printing until the job is over.")
@click.option("--json", "as_json", is_flag=True, help="Print the trainer's events instead, one JSON object a line.")
def logs(job_id: int, following: bool, as_json: bool) -> None:
    """Print the log of a job."""
    client = Client(Paths.from_environment())
    if as_json:
        for event in events(client, job_id, following):
            print_json(event, indent=None)
        return
    for piece in log(client, job_id, following):
        click.echo(printable(piece), nl=False)


@main.command()
@ID
def metrics(job_id: int) -> None:
    """Print a job's numbers, step by step, as CSV: offmate metrics 3 > run.csv"""
    from offmated.cli.metrics import as_csv

    for line in as_csv(events(Client(Paths.from_environment()), job_id, following=False)):
        click.echo(line)


@main.command()
@IDS
@json_option
def cancel(job_ids: tuple[int, ...], as_json: bool) -> None:
    """End jobs for good, a running one at once. Steps since its last checkpoint may be lost."""
    queue_commands.each(job_ids, Client(Paths.from_environment()).cancel, job_view.cancelled, as_json)


@main.command()
@IDS
@budget_options
@click.option("--allow-changed-data", is_flag=True, help="Train on the data files as they are now.")
@click.option("--allow-changed-model", is_flag=True, help="Use the model and the tokenizer as they are now.")
@json_option
def retry(
    job_ids: tuple[int, ...],
    gpu_budget: str | None,
    cpu_budget: str | None,
    allow_changed_data: bool,
    allow_changed_model: bool,
    as_json: bool,
) -> None:
    """Try failed or cancelled jobs again, each from its last checkpoint if it has one."""
    budgets = {"gpu_budget": gpu_budget, "cpu_budget": cpu_budget}
    client = Client(Paths.from_environment())
    sizes = {name: parse_bytes(size) for name, size in budgets.items() if size is not None}
    again = partial(
        client.retry, allow_changed_data=allow_changed_data, allow_changed_model=allow_changed_model, **sizes
    )
    queue_commands.each(job_ids, again, job_view.retried, as_json)


@main.command()
@ID
@click.option(
    "--epochs", type=float, help="Continue a done job from its last checkpoint, up to this many epochs in all."
)
@click.option("--max-steps", type=int, help="The same, up to this many steps in all.")
@queue_commands.turn_options
@json_option
def rerun(job_id: int, epochs: float | None, max_steps: int | None, as_json: bool, **turn: Any) -> None:
    """Submit a job again, as a new one: the same file, with the data as they are now."""
    if epochs is not None and max_steps is not None:
        raise click.UsageError("give --epochs or --max-steps, not both")
    if epochs is not None and not 0 < epochs < math.inf:
        raise click.UsageError(f"--epochs {epochs} is not above 0")
    client, when = Client(Paths.from_environment()), queue_commands.turn(turn)
    job = hand_in(client, console(stderr=as_json), lambda key: client.rerun(job_id, when, epochs, max_steps, key=key))
    print_json(job) if as_json else console().print(job_view.submitted(job))


for command in (
    queue_commands.pause,
    queue_commands.resume,
    queue_commands.hold,
    queue_commands.release,
    queue_commands.move,
    queue_commands.wait,
):
    main.add_command(command)


@main.command()
@click.option("--foreground", is_flag=True, help="Stay in the foreground, for a service manager.")
@json_option
def up(foreground: bool, as_json: bool) -> None:
    """Start the daemon."""
    only_here("up")
    paths = Paths.from_environment()
    if foreground and as_json:
        raise click.UsageError("--foreground and --json do not go together: a daemon in the foreground prints its log")
    if foreground:
        os.execv(sys.executable, [sys.executable, "-P", "-m", "offmated"])
    started = start_in_background(paths)
    if as_json:
        print_json({"started": started, **Client(paths).health()})
    else:
        say(f"The daemon {'runs' if started else 'was running already'}; its state is in {paths.state}")
        with suppress(UserError, *NOT_UNDERSTOOD):  # the daemon runs, even if this fails
            if words := unknown_words(Client(paths)):
                say(words)


@main.command()
@json_option
def down(as_json: bool) -> None:
    """End the daemon. A running job saves a checkpoint first and continues at the next start."""
    only_here("down")
    paths = Paths.from_environment()
    client, ran = Client(paths), runs(paths)
    if ran:
        with suppress(UserError, *NOT_UNDERSTOOD):  # a daemon whose answer is not understood is ended, too
            for job in client.jobs(JobState.RUNNING):
                click.echo(f"Job {job['id']} saves a checkpoint first.", err=True)
        client.shutdown()
    if as_json:
        print_json({"ended": ran})
    else:
        click.echo("The daemon has ended." if ran else "The daemon was not running.")


@main.command()
@json_option
def page(as_json: bool) -> None:
    """Print the address of the daemon's page for a browser: jobs, curves, plans. Anyone with the address may do what
    you may do. The port stays the same unless another program takes it; listen in config.toml sets it."""
    url = Client(Paths.from_environment()).page_url()
    print_json({"url": url}) if as_json else click.echo(url)


@main.command()
@click.option(
    "--hours", type=click.FloatRange(min=0), default=24.0, show_default=True, help="How many hours back to look."
)
@json_option
def report(hours: float, as_json: bool) -> None:
    """Print which jobs ended recently, which run now and which come next."""
    summary = Client(Paths.from_environment()).report(max(0.0, time.time() - 3600 * hours))
    print_json(summary) if as_json else say("\n".join((summary["title"], *summary["lines"])))


@main.command()
def notify() -> None:
    """Send a test message to the addresses in `notify` of config.toml."""
    only_here("notify")
    message = json.dumps({"title": "offmate", "body": "This is where you will hear of your jobs."})
    done = subprocess.run([sys.executable, "-P", "-m", "offmated.service.notify"], input=message, text=True)
    if done.returncode == 0:
        click.echo("The message was accepted.")
    sys.exit(done.returncode)


main.add_command(adopt)
main.add_command(clean)
main.add_command(service)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completions(shell: str) -> None:
    """Print a script that makes SHELL complete offmate's commands and options: eval "$(offmate completions bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "offmate", "_OFFMATE_COMPLETE").source())


main.add_command(plans)


@main.command("doctor")
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Measure this folder's drive, for disk_paths, instead of the state folder's.",
)
@json_option
def examine(folders: tuple[Path, ...], as_json: bool) -> None:
    """Check that this machine has all that jobs need. Exits with 1 when something is missing."""
    check_linux()
    from offmated.cli import doctor

    checks = list(doctor.examine(Paths.from_environment(), folders))
    print_json(doctor.as_json(checks)) if as_json else console().print(doctor.as_table(checks))
    sys.exit(Exit.FAILED if any(check.verdict == doctor.PROBLEM for check in checks) else Exit.DONE)

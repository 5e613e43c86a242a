"""Defines the commands for the queue (`hold`, `release`, `pause`, `resume`, `move`, `wait`) and the options that say
when a job is to begin."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, ParamSpec, cast

import click

from offmated.cli import job_view
from offmated.cli.client import Client, Json, Turn
from offmated.cli.output import ID, IDS, JobNumber, console, json_option, print_json
from offmated.jobs.states import FINAL, MOST_PRIORITY
from offmated.paths import Paths
from planner.errors import Exit, UserError
from planner.units import printable

P = ParamSpec("P")
POLL_S = 0.5
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Priority(click.ParamType[int]):
    """The click parameter type of a job's priority, a whole number. Anything else is refused in one sentence."""

    name = "number"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return `value` as a number if a job may have it as its priority, else make the command fail with a
        message."""
        if not (re.fullmatch("[+-]?[0-9]{1,4}", value) and abs(int(value)) <= MOST_PRIORITY):
            raise UserError(
                f"--priority {printable(value)} is not a priority.",
                code="bad-priority",
                exit_code=Exit.USAGE,
                hint=f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}; the default is 0",
            )
        return int(value)


PRIORITY = Priority()


class Moment(click.ParamType[float]):
    """The click parameter type of a time like 23:00, "2026-12-24 18:00" or +2h30m, which becomes seconds since 1970."""

    name = "time"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the time `value` in seconds since 1970; a time of day without a date is the next such time."""
        if isinstance(value, float):
            return value
        try:
            moment = moment_of(value, datetime.now())
            datetime.fromtimestamp(moment)  # raises for a time beyond the calendar
            return moment
        except (ValueError, OverflowError):
            raise UserError(
                f"--begin {printable(value)} is not a time.",
                code="bad-time",
                exit_code=Exit.USAGE,
                hint='write 23:00, "2026-12-24 18:00" or +2h30m',
            ) from None


def moment_of(text: str, now: datetime) -> float:
    """Convert a time as `Moment` accepts it to seconds since 1970. `now`, and times in `text`, are in local time.
    Raises ValueError."""
    if text.startswith("+"):
        parts = re.fullmatch(r"((\d+[smhd])+)", text[1:])
        if parts is None:
            raise ValueError(text)
        return now.timestamp() + sum(int(n) * SECONDS[unit] for n, unit in re.findall(r"(\d+)([smhd])", text))
    if re.fullmatch(r"\d{1,2}:\d{2}", text):
        at = datetime.combine(now.date(), datetime.strptime(text, "%H:%M").time())
        return (at if at > now else at + timedelta(days=1)).timestamp()
    return datetime.fromisoformat(text).timestamp()


def turn_options(command: Callable[P, None]) -> Callable[P, None]:
    """Add to a command the options that say when a job may start (priority, time, window, other jobs)."""

    @click.option("--priority", type=PRIORITY, help="Run before all jobs of lower priority. Default: 0.")
    @click.option("--after", type=JobNumber(), metavar="ID", help="Run only when this job is done.")
    @click.option("--begin", type=Moment(), help='Do not start before 23:00, "2026-12-24 18:00" or +2h30m.')
    @click.option("--window", metavar="HOURS", help='Run only in these hours: 23:00-07:00 or "23:00-07:00 mon-fri".')
    @click.option("--label", help="A word to find the job by.")
    @click.option("--hold", "held", is_flag=True, help="Hold the job until offmate release.")
    @functools.wraps(command)
    def with_turn(*args: P.args, **kwargs: P.kwargs) -> None:
        command(*args, **kwargs)

    return with_turn


def turn(options: dict[str, Any]) -> Turn:
    """The `Turn` (when a job may start) that the values of `turn_options` ask for."""
    renamed = {("begin_at" if name == "begin" else name): value for name, value in options.items()}
    return cast(Turn, {name: value for name, value in renamed.items() if value is not None})


def each(job_ids: Sequence[int], change: Callable[[int], Json], describe: Callable[[Json], str], as_json: bool) -> None:
    """Call `change` for each of the jobs and print its result: with `describe`, as a sentence, or as JSON. A job that
    cannot be changed is reported on stderr, and the others are changed all the same; the exit code is then that of the
    first error. The JSON is one job, or a list where several are named."""
    numbers, done, failed = tuple(dict.fromkeys(job_ids)), [], []
    for number in numbers:
        try:
            done.append(change(number))
        except UserError as error:
            if len(numbers) == 1 or error.exit_code is Exit.DAEMON_NOT_RUNNING:
                raise
            failed.append(error)
            click.echo(str(error), err=True)
        else:
            if not as_json:
                click.echo(printable(describe(done[-1])))
    if as_json:
        print_json(done if len(numbers) > 1 else done[0])
    if failed:
        sys.exit(failed[0].exit_code)


@click.command()
@IDS
@json_option
def hold(job_ids: tuple[int, ...], as_json: bool) -> None:
    """Keep waiting jobs from starting."""
    client = Client(Paths.from_environment())
    each(job_ids, lambda number: client.change(number, "hold"), job_view.changed, as_json)


@click.command()
@IDS
@json_option
def release(job_ids: tuple[int, ...], as_json: bool) -> None:
    """Let jobs wait only for their turns: remove hold, start time, window and dependency."""
    client, windows = Client(Paths.from_environment()), {}

    def change(number: int) -> Json:
        windows[number] = client.job(number)["window"]
        return client.change(number, "release")

    each(job_ids, change, lambda job: job_view.released(job, windows[job["id"]]), as_json)


@click.command()
@click.argument("job_ids", metavar="[ID]...", type=JobNumber(), nargs=-1)
@json_option
def pause(job_ids: tuple[int, ...], as_json: bool) -> None:
    """Have jobs save a checkpoint, free the GPU and wait for `resume`; without ID, pause the whole machine."""
    _paused(job_ids, "pause", as_json)


@click.command()
@click.argument("job_ids", metavar="[ID]...", type=JobNumber(), nargs=-1)
@json_option
def resume(job_ids: tuple[int, ...], as_json: bool) -> None:
    """Let paused jobs continue from their checkpoints; without ID, resume the whole machine."""
    _paused(job_ids, "resume", as_json)


@click.command()
@ID
@click.option("--first", "where", flag_value="first", help="Before all waiting jobs.")
@click.option("--last", "where", flag_value="last", help="After all waiting jobs.")
@click.option("--before", type=JobNumber(), metavar="ID", help="Before this job, with its priority.")
@click.option("--priority", type=PRIORITY, help="Before all jobs of lower priority.")
@json_option
def move(job_id: int, where: str | None, before: int | None, priority: int | None, as_json: bool) -> None:
    """Give a waiting job another place in the queue."""
    places = {"to": where, "before": before, "priority": priority}
    chosen = {name: value for name, value in places.items() if value is not None}
    if len(chosen) != 1:
        raise click.UsageError("give one of --first, --last, --before ID and --priority NUMBER")
    client = Client(Paths.from_environment())
    each([job_id], lambda number: client.move(number, **chosen), job_view.changed, as_json)


@click.command()
@click.argument("job_ids", metavar="[ID]...", type=JobNumber(), nargs=-1)
@click.option("--label", help="Wait for the jobs with this label that are not over.")
@json_option
def wait(job_ids: tuple[int, ...], label: str | None, as_json: bool) -> None:
    """Wait until jobs are over; without ID, until all are. Exits with the exit code of the first that did not end
    well."""
    client = Client(Paths.from_environment())
    numbers = list(job_ids) or [job["id"] for job in client.queue(label)]
    ended = []
    for number in numbers:
        while (job := client.job(number))["state"] not in FINAL:
            time.sleep(POLL_S)
        ended.append(job)
        if not as_json:
            console().print(job_view.ended(job))
    if as_json:
        print_json(ended)
    sys.exit(next((code for job in ended if (code := job_view.exit_code(job))), Exit.DONE))


def _paused(job_ids: tuple[int, ...], change: str, as_json: bool) -> None:
    client = Client(Paths.from_environment())
    if job_ids:
        each(job_ids, lambda number: client.change(number, change), job_view.changed, as_json)
        return
    answer = client.change_machine(change)
    stopped = "No job runs until offmate resume; a running one saves a checkpoint first."
    print_json(answer) if as_json else click.echo(stopped if answer["paused"] else "Jobs may run again.")

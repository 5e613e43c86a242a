"""Defines the command `init`, which writes a job file for the user's model, data and machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offmated.cli.output import console, json_option, print_json, say
from planner.errors import Exit, UserError

if TYPE_CHECKING:
    from offmated.cli.new_job import Machine

_STARTS = ("now", "night")


@click.command()
@click.argument("data", required=False)
@click.option("--model", metavar="ID|PATH", help="The model: a folder, or its name on the Hugging Face hub.")
@click.option("--hardware", metavar="CARD", help="The card to write the file for; default: this machine.")
@click.option("--start", type=click.Choice(_STARTS), help="When the job may run; night: from 23:00 to 07:00.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("job.yaml"),
    show_default=True,
    help="The file to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@json_option
def init(
    data: str | None,
    model: str | None,
    hardware: str | None,
    start: str | None,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Write a job file for DATA, a file or a folder. It chooses the first of full fine-tuning, LoRA and QLoRA that fits
    by a plan. Asks for what is not given.

    \b
    offmate init
    offmate init chats.jsonl --model Qwen/Qwen3-4B
    offmate init chats.jsonl --model ./llama --hardware rtx3060 --start night --output tonight.yaml
    """
    from offmated.cli import new_job  # late: importing it takes half of a command's start

    _check_output(output, force=force)
    asks = on_terminal()
    if not asks:
        _check_given(data, model, None if hardware is None and new_job.here_called() is None else "given")
    path = _data(data if data is not None else _ask("Data, a file or a folder", _data))
    machine = _machine(hardware, asks=asks)
    if model is None:
        names = new_job.suggestions(machine.card)
        where = "this machine" if machine.card is None else "this card"
        say(f"A model for {where} may be {', '.join(names[:-1])} or {names[-1]}.", err=True)
        model = _ask("Model, a folder or a name on the hub", new_job.model_named, default=names[0])
    named = new_job.model_named(model)
    if start is None:
        start = _ask("Start now or at night", _start, default="now") if asks else "now"
    screen = console(stderr=True)
    showing: AbstractContextManager[Any] = screen.status("reading the data") if screen.is_terminal else nullcontext()
    with showing as status:
        tell: Callable[[str], None] = status.update if status is not None else lambda text: say(f"{text} …", err=True)
        job = new_job.new_job(named, path, machine, night=start == "night", output=output, tell=tell)
    try:
        output.write_text(job.text, "utf-8")
    except OSError as error:
        raise _cannot_write(output, error.strerror or str(error)) from error
    commands = list(new_job.commands(job, output))
    if as_json:
        print_json({"file": str(output), **job.to_json(), "commands": commands})
        return
    say(job.text.rstrip("\n"))
    say(f"\nWritten to {output}. Next:")
    for command in commands:
        say(f"  {command}")


def on_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def _check_output(output: Path, *, force: bool) -> None:
    """Raise UserError if the file may not or cannot be written, as far as that is known before."""
    try:
        is_there, has_folder = output.exists(), output.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise _cannot_write(output, error.strerror or str(error)) from error
    if is_there and not force:
        raise UserError(
            f"{output} is there already.",
            code="file-exists",
            exit_code=Exit.USAGE,
            hint="--force replaces it, --output names another file",
        )
    if not has_folder:
        raise _cannot_write(output, f"there is no folder {output.parent}")
    if not os.access(output if is_there else output.parent, os.W_OK):
        raise _cannot_write(output, "you have no right to write there")


def _cannot_write(output: Path, why: str) -> UserError:
    return UserError(
        f"The file {output} cannot be written: {why}.",
        code="cannot-write",
        exit_code=Exit.USAGE,
        hint="--output names another file",
    )


def _check_given(data: str | None, model: str | None, hardware: str | None) -> None:
    """Raise UserError that names all arguments that are missing, where nobody can be asked."""
    given = {"DATA": data, "--model": model, "--hardware": hardware}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given, as there is no terminal to ask at.",
            code="usage",
            exit_code=Exit.USAGE,
            hint="offmate init data.jsonl --model Qwen/Qwen3-4B --hardware rtx3060 --start now",
        )


def _machine(hardware: str | None, *, asks: bool) -> Machine:
    from offmated.cli import new_job

    if hardware is None and asks:
        say("Cards are listed by: offmate plan --hardware list", err=True)
        hardware = _ask("Graphics card", new_job.machine_with, default=new_job.here_called())
    return new_job.machine_with(hardware)


def _ask(text: str, check: Callable[[str], object], *, default: str | None = None) -> str:
    """The user's answer, asked for again until `check` accepts it."""

    def checked(answer: str) -> str:
        try:
            check(answer)
        except UserError as error:
            raise click.UsageError(str(error)) from error
        return answer

    answer: str = click.prompt(text, default=default, value_proc=checked, err=True)
    return answer


def _data(text: str) -> Path:
    """The absolute path of data that are there. Raises UserError."""
    from planner.data.paths import resolve
    from planner.keys.source import shown

    try:
        path = Path(resolve(text, Path.cwd()))
        path.stat()
    except OSError as error:
        raise UserError(
            f"There is no file or folder {shown(text)}.",
            code="missing-file",
            exit_code=Exit.USAGE,
            hint="give the path of the data; for a dataset of the hub write the job file by hand",
        ) from error
    return path


def _start(text: str) -> None:
    if text not in _STARTS:
        raise UserError("Answer now or night.", code="usage", exit_code=Exit.USAGE)

"""Makes the page of the commands from their own help texts."""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterator

import click

from offmated.cli import main
from planner.errors import Exit

_GROUPS = {
    "Jobs": ("init", "run", "submit", "status", "show", "logs", "metrics", "wait", "cancel", "retry", "rerun"),
    "The queue": ("pause", "resume", "hold", "release", "move"),
    "Plans and checks": ("plan", "plans", "certify", "verify-resume"),
    "Job files and data": ("keys", "import", "preview", "explain"),
    "The trained model": ("export", "sample"),
    "The daemon": ("up", "down", "page", "report", "notify", "service"),
    "The machine": ("doctor", "clean", "adopt", "completions"),
}
_EXITS = {
    Exit.DONE: "The command is done.",
    Exit.FAILED: "The job failed, or the command could not do what it was asked.",
    Exit.USAGE: "The command, the job file or a setting is wrong.",
    Exit.DOES_NOT_FIT: "The job does not fit the memory or the disk.",
    Exit.NO_SUCH_JOB: "There is no such job or plan.",
    Exit.DAEMON_NOT_RUNNING: "The daemon is not running.",
    Exit.NO_ROOM_TO_SAY: "Only of processes that the daemon starts: the disk was too full to write down the error.",
    Exit.STOPPED: "Only of processes that the daemon starts: the process was asked to stop.",
    Exit.INTERRUPTED: "Ctrl-C ended the command.",
}

_HEAD = """\
# Commands

`offmate --help` lists the commands, and `offmate COMMAND --help` (or `-h`) describes one. `ID` is the number of a job;
`offmate status` lists the jobs with their numbers. `FILE` is a job file, of offmate or of another tool. With `--json` a
command prints JSON for programs.
"""


def page() -> str:
    """The Markdown of reference/commands.md. The anchor of `offmate submit` is `offmate-submit`."""
    top = click.Context(main, info_name="offmate")
    parts = [_HEAD]
    others = set(main.commands) - {name for names in _GROUPS.values() for name in names}
    if others:
        raise ValueError(f"docs/make/commands.py has no group for {', '.join(sorted(others))}")
    for title, names in _GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _command(main.commands[name], name, top)
    parts.append("## Exit codes\n\n| code | meaning |\n| --- | --- |")
    parts += [f"| {int(code)} | {_EXITS[code]} |" for code in Exit]
    return "\n".join(parts) + "\n"


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    path = context.command_path
    yield f"### {path} {{ #{path.replace(' ', '-')} }}\n"
    if not isinstance(command, click.Group):
        usage = " ".join((path, *command.collect_usage_pieces(context)))
        yield f"```\n{usage}\n```\n"
    yield _text(command.help or "")
    if options := [*_options(command, context)]:
        yield "\n".join(("| option | meaning |", "| --- | --- |", *options, ""))
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            yield from _command(command.commands[each], each, context)


def _text(text: str) -> str:
    """A help text as Markdown. A paragraph after "\\b" has lines of its own: examples."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "".join(
        f"```sh\n{paragraph.removeprefix(chr(8)).strip()}\n```\n\n"
        if paragraph.startswith("\b")
        else f"{html.escape(paragraph, quote=False)}\n\n"
        for paragraph in paragraphs
    )


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            names, text = record
            yield f"| `{names}` | {html.escape(text, quote=False).replace('|', '&#124;')} |"

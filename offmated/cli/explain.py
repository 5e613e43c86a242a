"""Defines `offmate explain`, which says what an error's code means and what to do about it."""

from __future__ import annotations

import difflib

import click
from rich.padding import Padding
from rich.text import Text

from offmated.cli.output import console, json_option, print_json
from planner.errors import Exit, UserError


@click.command("explain")
@click.argument("code")
@json_option
def explain(code: str, as_json: bool) -> None:
    """Say what caused an error and what to do. CODE is the word in brackets at the error's end."""
    from planner.error_codes import THEMES  # late: other commands need none of these
    from planner.job.described import plain

    known = {name: texts for theme in THEMES.values() for name, texts in theme.items()}
    named = code.strip("[]")
    if named not in known:
        near = difflib.get_close_matches(named, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "give the word in brackets at the end of an error"
        raise UserError(f"No error has the code {named}.", code="unknown-code", hint=hint, exit_code=Exit.USAGE)
    cause, cure = known[named]
    if as_json:
        print_json({"code": named, "cause": cause, "cure": cure})
        return
    screen = console()
    screen.print(Text(named, style="bold"))
    screen.print(Padding(Text(plain(cause)), (0, 0, 0, 2)))
    screen.print(Padding(Text(plain(cure)), (0, 0, 0, 2)))

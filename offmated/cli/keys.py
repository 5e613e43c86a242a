"""Defines `offmate keys`, which says what offmate makes of the configuration keys of other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from offmated.cli.output import json_option, print_json

if TYPE_CHECKING:
    from planner.importers.base import Meaning

TOOLS = {"axolotl": "axolotl", "llama-factory": "LLaMA-Factory", "llama-factory-v1": "LLaMA-Factory's v1", "trl": "TRL"}
"""A word for a tool -> its name in its file in `planner/importers/`."""

_HEAD = """\
# Keys of other tools

Every key that axolotl, LLaMA-Factory (v1, too) and TRL document, and what becomes of it in a job file. `offmate keys`
prints this from the tables that the reader itself goes by.

- *is* a key of offmate: it means that key, which `docs/jobs.md` describes;
- *no effect*: it changes nothing of what is learned; why is said at submission, unless it is switched off;
- *the planner's*: the planner decides where tensors are and what is recomputed; said likewise;
- *not there*: it asks for something that offmate does not do, and the job is refused in one line. Switched off (null,
  false, 0, "", "no", "none", an empty list) it may stay, as it may with a value in brackets;
- *beside* a key: it belongs to that one, and says nothing without it.
"""


@click.command("keys")
@click.argument("tool", required=False, type=click.Choice(list(TOOLS), case_sensitive=False))
@json_option
def keys(tool: str | None, as_json: bool) -> None:
    """Print what becomes of each key of axolotl, LLaMA-Factory and TRL, as Markdown; with TOOL of that tool's alone."""
    tables = meanings(tool)
    print_json(tables) if as_json else click.echo(page(tables), nl=False)


def meanings(tool: str | None = None) -> dict[str, dict[str, str]]:
    """Name of a tool -> its configuration key -> what offmate makes of that key, in words. `tool`: one of `TOOLS`; None
    for all."""
    from planner.importers import llama_factory_v1, tools  # late: other commands need none of them

    tables = {one.name: one.keys for one in tools.TOOLS} | {llama_factory_v1.V1: llama_factory_v1.LLAMA_FACTORY_V1}
    names = tables if tool is None else (TOOLS[tool],)
    return {name: {key: _words(key, meaning) for key, meaning in sorted(tables[name].items())} for name in names}


def page(tables: dict[str, dict[str, str]]) -> str:
    """The result of `meanings` as Markdown tables."""
    parts = [_HEAD]
    for tool, table in tables.items():
        parts.append(f"\n## {tool}\n\n| key | what becomes of it |\n|---|---|\n")
        parts += [f"| `{key}` | {words} |\n" for key, words in table.items()]
    return "".join(parts)


def _words(key: str, meaning: Meaning) -> str:
    fine = f" ({', '.join(f'`{value}`' for value in meaning.fine)})" if meaning.fine else ""
    return {
        "honoured": "as it is here" if meaning.text == key else f"is `{meaning.text}`",
        "unused": f"no effect: {meaning.text}",
        "planner": "the planner's",
        "not there": f"not there: {meaning.text}{fine}",
        "part": f"beside `{meaning.text}`",
    }[meaning.kind]

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

What offmate makes of each key that {tools} documents, in a job file:

- *as it is here*, or *is* another key: it means that key of offmate's, which docs/jobs.md describes;
- *no effect*: it changes nothing that is learned. `offmate submit` says why, unless the key is switched off;
- *the planner's*: the planner decides where tensors are kept and what is recomputed;
- *not supported*: it asks for something that offmate does not do, and the job is refused in one line. It may stay if it
  is switched off (null, false, 0, "", "no", "none", an empty list) or has one of the values in brackets;
- *beside* a key: it belongs to that key, and says nothing without it.
"""


@click.command("keys")
@click.argument("tool", required=False, type=click.Choice(list(TOOLS), case_sensitive=False))
@json_option
def keys(tool: str | None, as_json: bool) -> None:
    """Print what becomes of each key of axolotl, LLaMA-Factory and TRL, as Markdown. With TOOL, only
    that tool's keys."""
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
    parts = [_HEAD.format(tools=" or ".join(tables))]
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
        "not there": f"not supported: {meaning.text}{fine}",
        "part": f"beside `{meaning.text}`",
    }[meaning.kind]

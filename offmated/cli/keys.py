"""Defines `offmate keys`, which describes the keys of a job file, and says what offmate makes of other tools' keys."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.padding import Padding
from rich.text import Text

from offmated.cli.output import console, json_option, pairs, print_json, shorten
from planner.errors import Exit, UserError
from planner.units import counted

if TYPE_CHECKING:
    from planner.importers.base import Meaning
    from planner.job.described import Key, Section

TOOLS = {"axolotl": "axolotl", "llama-factory": "LLaMA-Factory", "llama-factory-v1": "LLaMA-Factory's v1", "trl": "TRL"}
"""A word for a tool -> its name in its file in `planner/importers/`."""
ALL = "all"
"""The word for all tools."""
_LONGEST_DEFAULT = 17
"""The most characters of a default in a list of keys."""

_HEAD = """\
# Keys of other tools

What offmate makes of each documented key of {tools} in a job file:

- *as it is here*, or *is* another key: it means that key of offmate's, which `offmate keys KEY` describes;
- *as it is there*: it means what that tool says, and sets several keys of offmate's;
- *no effect*: it changes nothing that is learned. `offmate submit` says why, unless the key is switched off;
- *the planner's*: the planner decides where tensors are kept and what is recomputed;
- *not supported*: it asks for something that offmate does not do, and the job is refused in one line. It may stay if it
  is switched off (null, false, 0, "", "no", "none", an empty list) or has one of the values in brackets;
- *beside* a key: it belongs to that key, and says nothing without it.
"""


@click.command("keys")
@click.argument("names", metavar="[KEY]...", nargs=-1)
@click.option(
    "--tool",
    type=click.Choice([*TOOLS, ALL], case_sensitive=False),
    help="Print what becomes of each key of this tool, or of all, as Markdown.",
)
@json_option
def keys(names: tuple[str, ...], tool: str | None, as_json: bool) -> None:
    """List the keys of a job file, or describe each KEY."""
    if tool is not None:
        if names:
            raise click.UsageError("give KEY or --tool, not both")
        tables = meanings(None if tool == ALL else tool)
        print_json(tables) if as_json else click.echo(page(tables), nl=False)
        return
    from planner.job.described import entry_section, sections  # late: other commands need none of it

    listed = (*sections(), entry_section())
    if names:
        found = [pair for name in names for pair in _found(name, listed)]
        print_json([_as_json(section, key) for section, key in found]) if as_json else _describe(found)
    elif as_json:
        print_json([_as_json(section, key) for section in listed for key in section.keys])
    else:
        _list(listed)


def _found(name: str, listed: tuple[Section, ...]) -> list[tuple[Section, Key]]:
    """The keys that are called `name` here or in another tool, with their sections: first those of a job, then those of
    an entry of `dataset`. Raises UserError where there is none."""
    pairs = [(section, key) for section in listed for key in section.keys]
    named = [(section, key) for section, key in pairs if key.name == name]
    found = named or [(section, key) for section, key in pairs if name in key.aliases]
    if found:
        return found
    from planner.importers.tools import SHORT

    known = [known for _, key in pairs for known in (key.name, *key.aliases)]
    near = [SHORT[name]] if name in SHORT else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "`offmate keys` lists all keys"
    if name.lower() in TOOLS:
        hint = f"offmate keys --tool {name.lower()} says what becomes of that tool's keys"
    raise UserError(f"A job file has no key {name}.", code="unknown-key", hint=hint, exit_code=Exit.USAGE)


def _as_json(section: Section, key: Key) -> dict[str, object]:
    return {"section": section.title} | asdict(key)


def _list(listed: tuple[Section, ...]) -> None:
    """Print a line for each key, below its section. On a terminal lines end at its width."""
    from planner.job.described import first_sentence, plain

    screen = console()
    width = max(len(key.name) for section in listed for key in section.keys)
    for section in listed:
        screen.print(Text(section.title, style="bold"))
        for key in section.keys:
            default = shorten(key.default or "required", _LONGEST_DEFAULT)
            line = f"  {key.name:{width}}  {default:{_LONGEST_DEFAULT}}  {plain(first_sentence(key.text))}"
            screen.print(Text(shorten(line, screen.width)), soft_wrap=True)
        screen.print("")
    count = sum(len(section.keys) for section in listed)
    screen.print(f"{counted(count, 'key')}. `offmate keys KEY` describes a key, also by its name in another tool.")


def _describe(found: list[tuple[Section, Key]]) -> None:
    """Print all that is said of some keys."""
    from planner.job.described import entry_section, plain

    screen = console()
    for place, (section, key) in enumerate(found):
        screen.print(*([""] if place else []), Text(key.name, style="bold"), sep="\n")
        rows = [("type", key.type), ("default", key.default or "none: the key is required")]
        rows += [("also accepted", ", ".join(key.aliases))] if key.aliases else []
        rows += [("where", "in an entry of dataset")] if section == entry_section() else []
        screen.print(Padding(pairs(rows), (0, 0, 0, 2)))
        screen.print(Padding(Text(plain(key.text)), (0, 0, 0, 2)))


def meanings(tool: str | None = None) -> dict[str, dict[str, str]]:
    """Name of a tool -> its configuration key -> what offmate makes of that key, in words. `tool`: one of `TOOLS`; None
    for all."""
    from planner.importers import llama_factory_v1, tools  # late: other commands need none of them
    from planner.job.described import sections

    tables = {one.name: one.keys for one in tools.TOOLS} | {llama_factory_v1.V1: llama_factory_v1.LLAMA_FACTORY_V1}
    names = tables if tool is None else (TOOLS[tool],)
    ours = {name for section in sections() for key in section.keys for name in (key.name, *key.aliases)}
    return {name: {key: _words(key, meaning, ours) for key, meaning in sorted(tables[name].items())} for name in names}


def page(tables: dict[str, dict[str, str]]) -> str:
    """The result of `meanings` as Markdown tables."""
    *names, last = tables
    parts = [_HEAD.format(tools=f"{', '.join(names)} and {last}" if names else last)]
    for tool, table in tables.items():
        parts.append(f"\n## {tool}\n\n| key | what becomes of it |\n|---|---|\n")
        parts += [f"| `{key}` | {words} |\n" for key, words in table.items()]
    return "".join(parts)


def _words(key: str, meaning: Meaning, ours: set[str]) -> str:
    """What becomes of a tool's key, in words. `ours`: the names of offmate's keys."""
    same = "as it is here" if key in ours else "as it is there"
    fine = f" ({', '.join(f'`{value}`' for value in meaning.fine)})" if meaning.fine else ""
    return {
        "honoured": same if meaning.text == key else f"is `{meaning.text}`",
        "unused": f"no effect: {meaning.text}",
        "planner": "the planner's",
        "not there": f"not supported: {meaning.text}{fine}",
        "part": f"beside `{meaning.text}`",
    }[meaning.kind]

"""Writes the settings of the command line into the text of a job file before it is submitted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from planner.errors import Exit, UserError
from planner.keys.source import read_text, read_yaml, shown, to_user_error
from planner.units import printable

_KEY = re.compile(r"\w[\w.-]*")


def read_job(path: Path, gpu_budget: str | None, cpu_budget: str | None) -> tuple[str, Path]:
    """Read the job file `path`, and put the budgets that are not None into its text. Returns the text and the file's
    absolute folder. Raises UserError when the file cannot be read."""
    return with_budgets(read_text(path), gpu_budget, cpu_budget), path.absolute().parent


def with_budgets(text: str, gpu_budget: str | None, cpu_budget: str | None) -> str:
    """The job file's `text` with those of the budgets that are not None put in."""
    for key, value in (("gpu_budget", gpu_budget), ("cpu_budget", cpu_budget)):
        if value is not None:
            text = with_value(text, key, value)
    return text


def with_settings(text: str, settings: Iterable[str]) -> str:
    """The job file's `text` with `settings` put in, each "KEY=VALUE" with a value as in the file. Raises UserError for
    a setting that is not of this form."""
    for key, parsed in map(_read_setting, settings):
        # Dumped within brackets, so that a list or a text with a colon stays on one line.
        value = yaml.safe_dump([parsed], default_flow_style=True, width=math.inf, allow_unicode=True, sort_keys=False)
        changed = _with_yaml(text, key, value.strip()[1:-1])
        _check_tool(_keys(text), _keys(changed), key)
        text = changed
    return text


def keys_of(settings: Iterable[str]) -> list[str]:
    """The keys of `settings`, texts like "KEY=VALUE"."""
    return [setting.partition("=")[0].strip() for setting in settings]


_SET, _INSTEAD = "--set ", ", in place of the file's "


def settings_in(notes: Sequence[str]) -> list[str]:
    """The settings, each "KEY=VALUE", that `notes_on_settings` described in the `notes` of a job."""
    return [note.removeprefix(_SET).partition(_INSTEAD)[0] for note in notes if note.startswith(_SET)]


def notes_on_settings(text: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Notes to the user on `settings`: each with its value, and with the value in the job file's `text` that it
    overrides. Raises UserError."""
    from planner.job.schema import CANONICAL

    values = {CANONICAL.get(key, key): value for key, value in read_yaml(text, "the file").values.items()}
    notes = []
    for key, parsed in map(_read_setting, settings):
        name = CANONICAL.get(key, key)
        instead = f"{_INSTEAD}{shown(values[name])}" if name in values else ""
        notes.append(f"{_SET}{key}={shown(parsed)}{instead}")
    return tuple(notes)


def _read_setting(setting: str) -> tuple[str, object]:
    """Key and value. Raises UserError."""
    key, separator, value = setting.partition("=")
    key = key.strip()
    read = read_yaml(f"value: {value}", f"--set {key}", allow_unclear=True) if separator and key else None
    if read is not None and read.unclear:
        raise to_user_error([replace(mistake, key=f"{_SET}{key}", line=None) for mistake in read.unclear], "--set")
    values = {} if read is None else read.values
    if values.keys() != {"value"} or not _KEY.fullmatch(key):  # a value with line breaks may add other keys
        raise UserError(
            f"--set takes KEY=VALUE, not {printable(setting)}.",
            code="usage",
            hint="--set max_length=512",
            exit_code=Exit.USAGE,
        )
    return key, values["value"]


def _check_tool(before: list[str], after: list[str], key: str) -> None:
    """Raise UserError where `key` means another key of the job in a file of this tool. Also where with `key` the file
    would be read as another tool's, so that the keys it leaves out would get that tool's defaults. `before` and
    `after`: the file's keys without and with the setting."""
    from planner.importers.tools import other_name, tool_of
    from planner.job.schema import CANONICAL

    tool, other = tool_of(before), tool_of(after)
    if (theirs := other_name(tool, key, CANONICAL.get(key, key))) is not None:
        raise UserError(
            f"--set {key} is something else in a file of {tool.name}'s.",
            code="usage",
            hint=f"--set {theirs}=…",
            exit_code=Exit.USAGE,
        )
    if tool is other:
        return
    gone = next((name for name in before if name not in after), None)
    raise UserError(
        f"With --set {key} the file would not read as {tool.name or 'offmate'}'s any more, but as "
        f"{other.name or 'offmate'}'s.",
        code="usage",
        numbers=("what it leaves out would be otherwise",),
        exit_code=Exit.USAGE,
        hint=f"--set {gone}=…, as the file calls it" if gone else f"write {key} into the file if that is meant",
    )


def with_value(text: str, key: str, value: str) -> str:
    """The YAML mapping `text` with `key` set to the YAML value `value`; everything else, comments included, stays as it
    was.

    A text that is not a mapping is returned unchanged: the code that parses it later says what is wrong with it."""
    return _with_yaml(text, key, yaml.safe_dump(value, default_style='"').strip())


def _with_yaml(text: str, key: str, value: str) -> str:
    from planner.job.schema import CANONICAL  # late: importing it takes half of a command's start

    if (node := _mapping(text)) is None:
        return text
    for name, old in _named(node):
        if CANONICAL.get(name.value, name.value) == CANONICAL.get(key, key):
            if old.start_mark.index < name.end_mark.index or text[old.start_mark.index] == "&":
                raise UserError(
                    f"{key} cannot be overridden: in the file it is an alias or has an anchor.",
                    code="usage",
                    hint=f"write {key} into the file",
                    exit_code=Exit.USAGE,
                )
            end = len(text[: old.end_mark.index].rstrip())  # YAML ends a list only where the next line begins
            return f"{text[: name.start_mark.index]}{key}: {value}{text[end:]}"
    if node.flow_style:
        start = node.start_mark.index + 1
        return f"{text[:start]}{key}: {value}, {text[start:]}"
    end, indent = node.end_mark.index, " " * node.start_mark.column  # at the end: lines keep their numbers
    before = text[:end] if text[:end].endswith("\n") else text[:end] + "\n"
    return f"{before}{indent}{key}: {value}\n{text[end:]}"


def _mapping(text: str) -> yaml.MappingNode | None:
    """The YAML mapping `text`; None where it is not a mapping."""
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return None
    return node if isinstance(node, yaml.MappingNode) else None


def _keys(text: str) -> list[str]:
    node = _mapping(text)
    return [] if node is None else [name.value for name, _ in _named(node)]


def _named(node: yaml.MappingNode) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    """The entries whose key is a text. What is wrong with other entries is said by whoever reads the file."""
    return [(name, value) for name, value in node.value if isinstance(name, yaml.ScalarNode)]

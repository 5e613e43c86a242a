"""A job file as it is handed in: its text, with the budgets of the command line written into it."""

from __future__ import annotations

from pathlib import Path

import yaml

from planner.jobfile import read_text


def read_job(path: Path, gpu_budget: str | None, cpu_budget: str | None) -> tuple[str, Path]:
    """The text of the job file and its absolute folder. Raises UserError when it cannot be read."""
    text = read_text(path)
    for key, value in (("gpu_budget", gpu_budget), ("cpu_budget", cpu_budget)):
        if value is not None:
            text = with_value(text, key, value)
    return text, path.absolute().parent


def with_value(text: str, key: str, value: str) -> str:
    """The YAML mapping `text` with `key` set to `value`, all else, comments included, as it was.

    Text that is no mapping comes back unchanged: whoever reads it will say what is wrong with it.
    """
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return text
    if not isinstance(node, yaml.MappingNode):
        return text
    quoted = yaml.safe_dump(value, default_style='"').strip()
    for name, old in node.value:
        if name.value == key:
            return f"{text[: old.start_mark.index].rstrip(' ')} {quoted}{text[old.end_mark.index :]}"
    if node.flow_style:
        start = node.start_mark.index + 1
        return f"{text[:start]}{key}: {quoted}, {text[start:]}"
    end, indent = node.end_mark.index, " " * node.start_mark.column  # at the end: lines keep their numbers
    before = text[:end] if text[:end].endswith("\n") else text[:end] + "\n"
    return f"{before}{indent}{key}: {quoted}\n{text[end:]}"

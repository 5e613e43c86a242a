"""Conversations as axolotl reads them from whatever file: nulls are absent, and texts that are to be JSON are read.

axolotl's `remove_none_values`, `_get_messages`, `_get_tools` and `transform_message` (version 0.19). No torch.
"""

from __future__ import annotations

from typing import Any

from planner.job.json_values import json_in
from planner.job.source import shown

_COLUMNS = ("messages", "conversations", "tools")


def as_axolotl(record: dict[str, Any]) -> dict[str, Any]:
    """A record under offmate's names, less the keys that are null. Messages, tools and parameters of a tool that are
    texts are read as JSON, with its nulls. Raises ValueError."""
    found: dict[str, Any] = _without_nulls(record)
    for column in _COLUMNS:
        _read_in(found, column, column)
    for tool in _objects(found.get("tools")):
        _read_in(tool.get("function"), "parameters", "parameters of a tool")
    return found


def with_arguments(message: Any) -> Any:
    """A message of such a record under offmate's names. Arguments of its calls that are JSON are what that says, so
    that a template writes them its own way. Raises ValueError."""
    for call in _objects(message.get("tool_calls") if isinstance(message, dict) else None):
        _read_in(call.get("function"), "arguments", "arguments of a call")
    return message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(its) for key, its in value.items() if its is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _read_in(place: Any, key: str, what: str) -> None:
    """Have what is under a key, where that is a text, be what the text is JSON of."""
    if isinstance(place, dict) and isinstance(said := place.get(key), str):
        try:
            place[key] = json_in(said)
        except ValueError as error:
            raise ValueError(f"axolotl reads {what} as JSON, and {shown(said, 80)} {error}") from None

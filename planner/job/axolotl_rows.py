"""Reads conversations as axolotl does, from any file: nulls count as absent, and texts that are to be JSON are parsed.

This is axolotl's `remove_none_values`, `_get_messages`, `_get_tools` and `transform_message` (version 0.19). No torch.
"""

from __future__ import annotations

from typing import Any

from planner.job.json_values import json_in
from planner.job.source import shown

_COLUMNS = ("messages", "conversations", "tools")


def as_axolotl(record: dict[str, Any]) -> dict[str, Any]:
    """A record with offmate's names, without keys that are null. Where messages, tools or a tool's parameters are
    texts, they are parsed as JSON, whose nulls stay. Raises ValueError."""
    found: dict[str, Any] = _without_nulls(record)
    for column in _COLUMNS:
        _read_in(found, column, column)
    for tool in _objects(found.get("tools")):
        _read_in(tool.get("function"), "parameters", "parameters of a tool")
    return found


def with_arguments(message: Any) -> Any:
    """A message of such a record, with offmate's names. Its calls' arguments that are texts are parsed as JSON, so that
    a template writes them its own way. Raises ValueError."""
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
    """Replace a text under a key by the JSON value in it."""
    if isinstance(place, dict) and isinstance(said := place.get(key), str):
        try:
            place[key] = json_in(said)
        except ValueError as error:
            raise ValueError(f"axolotl reads {what} as JSON, and {shown(said, 80)} {error}") from None

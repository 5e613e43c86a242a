"""Turns dataclasses into JSON values with the same field names and back. Errors give the path of the wrong field."""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The object that the JSON text contains; None if the text is not JSON, or contains something else than an
    object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def to_json(value: object) -> Json:
    """The JSON form of a dataclass, list, tuple, Enum, number, string or None. Raises TypeError for other values."""
    if is_dataclass(value) and not isinstance(value, type):
        named: dict[str, Json] = {"kind": typing.cast(Any, value).kind} if _is_named(type(value)) else {}
        return {**named, **{field.name: to_json(getattr(value, field.name)) for field in fields(value)}}
    if isinstance(value, Enum):
        return typing.cast(Json, value.value)
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def from_json(cls: type[T], data: object, path: str = "$") -> T:
    """The instance of `cls` that `data`, a parsed JSON value, describes. Raises ValueError that names the path of a
    wrong field."""
    return typing.cast(T, _decode(cls, data, path))


def _decode(kind: Any, data: object, path: str) -> object:
    origin = get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in get_args(kind):
            return None
        return _decode(_named(kind, data, path), data, path)
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list, got {_shown(data)}")
        return tuple(_decode(get_args(kind)[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError:
            raise ValueError(f"{path}: {_shown(data)} is none of {[m.value for m in kind]}") from None
    if kind is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise ValueError(f"{path}: {data} is not a finite number")
        return float(data)
    if kind is int and isinstance(data, int) and not isinstance(data, bool):
        return data
    if kind is bool and isinstance(data, bool):
        return data
    if isinstance(kind, type) and issubclass(kind, str) and isinstance(data, str):
        return kind(data)
    raise ValueError(f"{path}: expected {getattr(kind, '__name__', kind)}, got {_shown(data)}")


def _is_named(cls: type) -> bool:
    """Whether the class has a `kind` that is no field: it tells the class from others in a union."""
    return "kind" in cls.__dict__ and "kind" not in {field.name for field in fields(cls)}


def _named(union: Any, data: object, path: str) -> Any:
    """The class within the union that `data` describes: by `kind` where there are several. Raises ValueError."""
    classes = [cls for cls in get_args(union) if cls is not type(None)]
    if len(classes) == 1 or not isinstance(data, dict):
        return classes[0]
    for cls in classes:
        if cls.kind == data.get("kind"):
            return cls
    raise ValueError(f"{path}.kind: {_shown(data.get('kind'))} is none of {[cls.kind for cls in classes]}")


def _decode_dataclass(cls: type, data: object, path: str) -> object:
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object, got {_shown(data)}")
    hints = _types_of(cls)
    known = {field.name: field for field in fields(cls)}
    for name in data:
        if name not in known and not (name == "kind" and _is_named(cls)):
            raise ValueError(f"{path}.{name}: unknown field; known are {', '.join(known)}")
    values = {}
    for name, field in known.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{path}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}.{name}: missing")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@functools.cache  # a trace has thousands of values of few classes
def _types_of(cls: type) -> dict[str, Any]:
    """The type of each field of a dataclass, by its name."""
    return get_type_hints(cls)


def _shown(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."

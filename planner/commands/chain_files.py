"""Reads chains from JSON files: fields of `Chain`, with defaults for those not given.

A tensor must have a name and `elements`. By default `bytes` are 4 per element, `gradient_bytes` equal `bytes`, and
`state_bytes` are 8 per element, plus 4 (the fp32 master) where `bytes` are fewer than 4 per element. A frozen tensor
(`trainable: false`) has neither gradient nor states. By default a block is called "block" and its number, its `kind` is
its name, and it has no tensors and one option "keep". Its frame holds its input and output: `forward_held_bytes` and
`backward_frame_bytes` are `input_bytes`, `forward_frame_bytes` and `backward_held_bytes` are `output_bytes`. The last
block has forward figures only. All other numbers are 0, `reads_input` is true, `reads_weights` names all of the block's
weights, `recipe` is the option's name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from planner.codec import from_json
from planner.errors import Exit, UserError
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain

NO_LIMIT_BYTES = 2**62
_T = TypeVar("_T", Chain, Hardware)


def load_chain(path: Path) -> Chain:
    """The chain in the JSON file `path`. Raises UserError (exit code 2) that names the path of a wrong field."""
    data = read_json(path)
    if isinstance(data, dict) and isinstance(data.get("blocks"), list):
        blocks = data["blocks"]
        data = data | {
            "blocks": [_block(b, i, last=i == len(blocks) - 1) for i, b in enumerate(blocks)],
            "frame_tensors": _each(data.get("frame_tensors", []), _tensor),
        }
    return decoded(Chain, data, path)


def _block(data: object, index: int, *, last: bool) -> object:
    if not isinstance(data, dict):
        return data
    name = data.get("name", f"block{index}")
    received, sent = data.get("input_bytes", 0), data.get("output_bytes", 0)
    backward = (0, 0) if last else (sent, received)
    defaults = {
        "name": name,
        "kind": name,
        "forward_held_bytes": received,
        "forward_frame_bytes": sent,
        "backward_held_bytes": backward[0],
        "backward_frame_bytes": backward[1],
    }
    parts = {
        "tensors": _each(data.get("tensors", []), _tensor),
        "options": _each(data.get("options", [{"name": "keep"}]), _option),
    }
    return defaults | data | parts


def _tensor(data: object) -> object:
    if not isinstance(data, dict) or not isinstance(data.get("elements"), int):
        return data
    elements, trains = data["elements"], data.get("trainable", True) is not False
    size = data.get("bytes", 4 * elements)
    master = 4 * elements if isinstance(size, int) and size < 4 * elements else 0
    states = 8 * elements + master if trains else 0
    return {"bytes": size, "gradient_bytes": size if trains else 0, "state_bytes": states} | data


def _option(data: object) -> object:
    return {"recipe": data["name"]} | data if isinstance(data, dict) and "name" in data else data


def _each(data: object, fill: Any) -> object:
    return [fill(item) for item in data] if isinstance(data, list) else data


def read_json(path: Path) -> object:
    """The content of a JSON file, as `checked` returns it. Raises UserError (exit code 2)."""
    try:
        data: object = json.loads(text_of(path), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise wrong(path, f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise wrong(path, "its lists and objects are nested too deeply") from None
    except _Twice as error:
        raise wrong(path, f"{error}: the field is there twice in one object") from None
    return checked(data, path)


def text_of(path: Path) -> str:
    """The text of the file `path`. Raises UserError (exit code 2)."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise wrong(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise wrong(path, "it is not text in UTF-8") from None


def checked(data: object, path: Path) -> object:
    """The `data` of the file `path`, with whole numbers such as 12e9 as int. Raises UserError (exit code 2) for numbers
    that no chain and no machine has."""
    for place, number in _numbers(data, "$"):
        if not math.isfinite(number):
            raise wrong(path, f"{place} is {number}; it must be a finite number")
        if number < 0:
            raise wrong(path, f"{place} is {number}; it must be zero or more")
        if number > NO_LIMIT_BYTES:
            raise wrong(path, f"{place} is {number}; that is more than any machine has")
    return _whole(data)


class _Twice(Exception):
    """Raised for an object that has two fields of one name."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return members


def _numbers(data: object, place: str) -> Iterator[tuple[str, float]]:
    """Every number in `data` with the path of its place."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _numbers(value, f"{place}.{key}")
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _numbers(value, f"{place}[{index}]")
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield place, data


def _whole(data: object) -> object:
    """`data` with whole numbers such as 12e9 as int: JSON has only one sort of number."""
    if isinstance(data, dict):
        return {key: _whole(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_whole(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data


def decoded(cls: type[_T], data: object, path: Path) -> _T:
    """The instance of `cls` that the `data` of the file `path` describe. Raises UserError (exit code 2)."""
    try:
        return from_json(cls, data)
    except ValueError as error:
        raise wrong(path, str(error)) from None


def wrong(path: Path, *mistake: str, hint: str = "docs/reference/plan-files.md lists the fields") -> UserError:
    """The error for the file `path`, with what is wrong in it."""
    return UserError(f"Cannot use {path}.", numbers=mistake, hint=hint, code="bad-file", exit_code=Exit.USAGE)

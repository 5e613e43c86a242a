"""Reads a machine from a YAML or JSON file: fields of `Hardware`, and the words of the command line.

Words stand for the fields that they decide on the command line, too: `card` (a card's name) for all of them,
`cpu_memory` (the host's whole memory), `link` and `drive`; `gpu_memory` is the card's whole memory. A field in the file
stands above the words, and a word above what `card` says.

A machine must have a `card`, or `h2d_bytes_per_s` or a `link`, and `cpu_update_parameters_per_s` or
`cpu_memory_bytes_per_s`. By default `d2h_bytes_per_s` equals `h2d_bytes_per_s`, updates on the CPU are as fast as
`cpu_memory_bytes_per_s` lets them be, memory sizes and other rates are no limit, and everything else is 0.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.codec import to_json
from planner.commands.chain_files import NO_LIMIT_BYTES, checked, decoded, read_json, text_of, wrong
from planner.errors import UserError
from planner.keys.source import read_yaml
from planner.machine.hardware import Hardware
from planner.machine.presets import drive_figures, link_figures, preset, usable_cpu_bytes, usable_gpu_bytes
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES
from planner.units import parse_bytes

_MAY_BE_ZERO = {
    "flops_per_s",
    "disk_sustained_bytes_per_s",
    "gpu_rounded_update_parameters_per_s",
    "cpu_rounded_update_parameters_per_s",
}  # 0 means not known, or no limit
_FOLLOWS = {"h2d_bytes_per_s": "d2h_bytes_per_s", "cpu_memory_bytes_per_s": "cpu_update_parameters_per_s"}
"""Field -> the field that follows from it: a file that gives only the first has no use for the card's second."""


def load_hardware(path: Path, *, bf16: bool) -> Hardware:
    """The machine in the file `path`: JSON if its name ends in .json, else YAML. `bf16`: the job computes in bf16, not
    in fp32, which decides the rate of a `card`. Raises UserError (exit code 2) that names the path of a wrong field."""
    data = read_json(path) if path.suffix.lower() == ".json" else checked(_read_yaml(path), path)
    if isinstance(data, dict):
        data = _with_defaults(_in_fields(data, path, bf16=bf16), path)
    return decoded(Hardware, data, path)


def _read_yaml(path: Path) -> dict[str, Any]:
    text = text_of(path)
    try:
        return read_yaml(text, path.name).values
    except UserError as error:
        raise wrong(path, *(error.numbers or (error.what,))) from None


def _in_fields(data: dict[str, Any], path: Path, *, bf16: bool) -> dict[str, Any]:
    """The fields of the machine that the file's `data` describe with fields and words."""
    words: dict[str, Callable[[str], dict[str, Any]]] = {
        "card": lambda name: _of_card(name, bf16=bf16),
        "gpu_memory": lambda size: {"gpu_bytes": _usable(size, usable_gpu_bytes)},
        "cpu_memory": lambda size: {"cpu_bytes": _usable(size, usable_cpu_bytes)},
        "link": link_figures,
        "drive": drive_figures,
    }
    known = [*words, *(field.name for field in dataclasses.fields(Hardware))]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise wrong(path, f"$.{key}: unknown field" + (f"; did you mean {near[0]}?" if near else ""))
    fields: dict[str, Any] = {}
    for word, figures in words.items():
        if word not in data:
            continue
        value = data[word]
        if not isinstance(value, (str, int)) or isinstance(value, bool):
            raise wrong(path, f"$.{word}: expected a text, got {value!r}")
        try:
            fields |= figures(str(value))  # 4090 is a name, too
        except UserError as error:
            raise wrong(path, f"$.{word}: {error.what}", *error.numbers, hint=error.hint) from None
        except ValueError as error:
            raise wrong(path, f"$.{word}: {error}") from None
    for field, follows in _FOLLOWS.items():
        if field in data:
            fields.pop(follows, None)
    return fields | {key: value for key, value in data.items() if key not in words}


def _of_card(name: str, *, bf16: bool) -> dict[str, Any]:
    fields = to_json(preset(name, bf16=bf16))
    assert isinstance(fields, dict)
    return {field: value for field, value in fields.items() if field != "name"}


def _usable(size: str, usable: Callable[[int], int]) -> int:
    """The bytes that a job may use of a memory of `size`. Raises ValueError."""
    found = usable(parse_bytes(size))
    if found <= 0:
        raise ValueError(f"{size} leaves no memory for a job; give the whole memory with its unit, such as 24GiB")
    return found


def _with_defaults(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    for field, value in fields.items():
        if field.endswith("_per_s") and field not in _MAY_BE_ZERO and value == 0:
            raise wrong(path, f"$.{field} is 0; a rate is more than zero")
    if "h2d_bytes_per_s" not in fields:
        raise wrong(path, "$.h2d_bytes_per_s: missing, and so are $.link and $.card")
    if "cpu_update_parameters_per_s" not in fields and "cpu_memory_bytes_per_s" not in fields:
        missing = "$.cpu_update_parameters_per_s: missing, and so is $.cpu_memory_bytes_per_s; $.card would do, too"
        raise wrong(path, missing)
    rates = {key: value for key, value in fields.items() if isinstance(value, (int, float))}
    up = rates.get("h2d_bytes_per_s", 0.0)
    down = rates.get("d2h_bytes_per_s", up)
    updates = rates.get("cpu_update_parameters_per_s", rates.get("cpu_memory_bytes_per_s", 0.0) / UPDATE_TRAFFIC_BYTES)
    # "No limit" is more than all users of host memory could ask for, but small enough for a solver's arithmetic.
    return {
        "name": path.stem,
        "gpu_bytes": NO_LIMIT_BYTES,
        "cpu_bytes": NO_LIMIT_BYTES,
        "d2h_bytes_per_s": down,
        "gpu_update_parameters_per_s": 1000 * max(up, updates),
        "cpu_update_parameters_per_s": updates,
        "cpu_memory_bytes_per_s": 10 * (up + down + UPDATE_TRAFFIC_BYTES * updates),
    } | fields

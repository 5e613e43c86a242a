"""Reads the datasets in a file of LLaMA-Factory's v1 as entries of a job's `dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.job.paths import data_finder, looks_local
from planner.job.source import shown

_INFO = ("path", "source", "split", "converter", "size", "weight", "streaming")
_MOST = 10**9
_UNKNOWN = -1


def entries_of(
    infos: Mapping[str, Any], place: Path, *, seed: object
) -> tuple[list[dict[str, Any]], list[tuple[str, Exception]]]:  # fmt: skip
    """The entries for v1's datasets, whose paths start at `place`, and the errors, each with its dataset's name.
    `seed`: the file's, for draws."""
    found, wrong, drawn = [], list[tuple[str, Exception]](), 0
    for name, info in infos.items():
        try:
            entry, drawn = _entry(info, place, drawn, 42 if seed is None else seed)
            found.append(entry)
        except (OSError, TypeError, ValueError) as error:
            wrong.append((name, error))
    return found, wrong


def _entry(info: object, place: Path, drawn: int, seed: object) -> tuple[dict[str, Any], int]:
    """A dataset as an entry, and how many numbers v1's generator has given after it. `drawn`: the numbers that it gave
    before, or `_UNKNOWN`. Raises OSError, TypeError and ValueError."""
    if not isinstance(info, dict) or not isinstance(info.get("path"), str):
        raise ValueError(f"a dataset has a path, this is {shown(info)}")
    if strange := next((key for key in info if key not in _INFO), None):
        raise ValueError(f"{strange} is no key of a dataset; known are {', '.join(_INFO)}")
    if info.get("streaming"):
        raise ValueError("streaming is true, which v1 does not train on; leave it out")
    if (kind := info.get("source", "hf_hub")) not in ("hf_hub", "local"):
        raise ValueError(f"source is {shown(kind)}; local files and hf_hub are read")
    converter = info.get("converter") or "v1"
    if converter not in ("v1", "alpaca", "sharegpt"):
        pair = ", which is for preferences" if converter == "pair" else ""
        raise ValueError(f"converter is {shown(converter)}{pair}; known are alpaca and sharegpt, or none for v1's form")
    path = info["path"]
    if kind == "local" or looks_local(path, place):
        path = data_finder(place)(path if path.startswith(("/", "~")) else str(place / path))
    entry: dict[str, Any] = {"path": path, "converter": converter}
    entry |= {"split": info["split"]} if info.get("split") else {}
    entry |= {"type": "instructions" if converter == "alpaca" else "messages"}
    entry |= {"columns": {"messages": "conversations"}} if converter == "sharegpt" else {}
    size, weight = info.get("size"), info.get("weight")
    for key, value in (("size", size), ("weight", weight)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value <= _MOST):
            raise ValueError(f"{key} is {shown(value)}; it must be a number above 0, at most 10^9")
    if size is None and weight is None:
        return entry, drawn
    if drawn == _UNKNOWN:
        raise ValueError("it is drawn behind a dataset with weight and without size; give that one last")
    entry["draw"] = {"seed": seed, "size": size, "weight": weight, "skip": drawn}
    if size is None:
        return entry, _UNKNOWN
    return entry, drawn + int(size) + (int(size * weight) if weight is not None else 0)

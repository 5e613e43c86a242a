"""What a dataset on this machine is: which files it has, and of which kind. No torch: a job is checked by it when it is
handed in, and the trainer reads by it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["json", "csv", "parquet", "arrow", "text"]

KINDS: dict[str, Kind] = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
"""Suffix of a file -> what is in it, by the names of the readers of `datasets`."""

_SUFFIXES = ", ".join(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """The files of a dataset, in the order in which they are read; `delimiter`: what parts the cells of csv files."""

    kind: Kind
    files: tuple[Path, ...]
    delimiter: str = ","


def is_local(entry: str) -> bool:
    """Whether an entry of a resolved job's `dataset` is a path; otherwise it is of the hub, whatever stands beside."""
    return entry.startswith("/")


def local_data(path: Path) -> LocalData:
    """What is at `path`: a file, a folder with files of one kind, or one of `Dataset.save_to_disk`. Raises ValueError,
    FileNotFoundError where there is nothing."""
    if not path.exists():
        raise FileNotFoundError(f"there is no dataset at {path}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return LocalData(kind="arrow", files=_saved(path))
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix.lower() in KINDS)
    if not found:
        raise FileNotFoundError(f"{path} holds no {_SUFFIXES} file")
    if path.is_file() and path.suffix.lower() not in KINDS:
        raise ValueError(f"{path} is none of {_SUFFIXES}")
    kinds = Counter(KINDS[file.suffix.lower()] for file in found)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(f"{path} mixes file types: {counts}; list the files as separate entries of dataset")
    return LocalData(kind=next(iter(kinds)), files=tuple(found))


def _saved(folder: Path) -> tuple[Path, ...]:
    """The files of a folder of `Dataset.save_to_disk`. Raises ValueError."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        return tuple(folder / file["filename"] for file in state["_data_files"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}/state.json is not what Dataset.save_to_disk writes") from error

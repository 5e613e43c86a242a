"""What a dataset on this machine is: which files it has, of which kind, and what the columns of a csv file are. No
torch: a job is checked by it when it is handed in, and the trainer reads by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["json", "csv", "parquet", "text", "saved"]

KINDS: dict[str, Kind] = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
"""Suffix of a file -> what is in it, by the names of the readers of `datasets`."""

_SUFFIXES = ", ".join(KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """The files of a dataset, in the order in which they are read. Kind "saved" is a folder of `Dataset.save_to_disk`,
    which has no files to read one by one."""

    kind: Kind
    files: tuple[Path, ...]


def is_local(entry: str) -> bool:
    """Whether an entry of a resolved job's `dataset` is a path; otherwise it is of the hub, whatever stands beside."""
    return entry.startswith("/")


def local_data(path: Path) -> LocalData:
    """What is at `path`: a file, or a folder with files of one kind. Raises ValueError, FileNotFoundError where there
    is nothing."""
    if not path.exists():
        raise FileNotFoundError(f"there is no dataset at {path}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return LocalData(kind="saved", files=())
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


def csv_columns(rows: Iterator[list[str]]) -> list[str]:
    """The names in the first of a csv file's rows that is not blank, which is taken; none where all are."""
    return next((row for row in rows if "".join(row).strip()), [])

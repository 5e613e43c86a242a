"""What a dataset on this machine is: which files it has, of which kind, and what rows and columns csv files have. No
torch: a job is checked by it when it is handed in, and the trainer reads by it."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["json", "csv", "parquet", "arrow", "text", "saved"]

KINDS: dict[str, Kind] = {
    ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
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


def csv_columns(files: Sequence[Path]) -> tuple[str, ...]:
    """The columns of csv files, by the first one's order; no names where it has none. Raises ValueError for a file with
    others than the first: the reader goes by the first, and would drop them."""
    names = [_csv_names(file) for file in files]
    for file, other in zip(files, names, strict=True):
        if set(other) != set(names[0]):
            columns, others = (", ".join(found) or "none" for found in (names[0], other))
            where = os.path.relpath(file, files[0].parent)
            raise ValueError(f"{files[0].name} has the columns: {columns}; {where}: {others}")
    return names[0]


def csv_rows(lines: Iterable[str], *, whole: bool = True) -> Iterator[tuple[int, list[str]]]:
    """The rows of a csv file, each with the number of its first line. Blank lines are none, to pandas too. Raises
    ValueError for a quote that is not closed; where the file goes on (not `whole`) such a row is left out."""
    line: str | None = None

    def noted() -> Iterator[str]:
        nonlocal line
        for read in lines:
            line = read
            yield read
        line = None

    rows = csv.reader(noted())
    start = 1
    for row in rows:
        if line is None:
            if whole:
                raise ValueError(f"the quote that line {start} opens is not closed")
            return
        if line.strip(" \t\r\n"):
            yield start, row
        start = rows.line_num + 1


def _csv_names(file: Path) -> tuple[str, ...]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        _, names = next(csv_rows(lines), (0, []))
    return tuple(dict.fromkeys(name for name in names if name))

"""Finds the files of a dataset on this machine and their file type. The check at submission and the trainer both use
this. Does not import torch."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["json", "csv", "parquet", "arrow", "text"]

KINDS: dict[str, Kind] = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Suffix of a data file -> its type, named like the loaders of `datasets`."""

_SUFFIXES = ", ".join(KINDS)
_PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip")
_NOT_READ = (".tsv", ".feather", ".orc", ".xlsx")
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "state.json")
"""Files that `datasets` writes beside the data."""
_SPLIT = r"(^|[/._ -])(%s)([/._ -]|$)"
_TRAIN = re.compile(_SPLIT % "train|training", re.IGNORECASE)
_HELD_OUT = re.compile(_SPLIT % "test|testing|eval|evaluation|validation|valid|val|dev", re.IGNORECASE)
"""Matches file names that belong to a split other than train, by the rules of `datasets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalData:
    """The files of a dataset, in reading order. `delimiter`: the character between the cells of CSV files; `columns`:
    the columns that are used, None for all."""

    kind: Kind
    files: tuple[Path, ...]
    delimiter: str = ","
    columns: tuple[str, ...] | None = None


def is_local(entry: str) -> bool:
    """Return whether a dataset of a resolved job is a path and not a hub id. Paths in a resolved job are absolute, so
    an id stays an id even where a file has its name."""
    return Path(entry).is_absolute()


def local_data(path: Path) -> LocalData:
    """Return the dataset at `path`: a file, a folder with files of one type, or a folder that `Dataset.save_to_disk` or
    `DatasetDict.save_to_disk` wrote (of the latter, its split train). Raises FileNotFoundError where there are no data
    files, ValueError for files that cannot be used."""
    if not path.exists():
        raise FileNotFoundError(f"there is no dataset at {path}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return _saved(path)
    if (path / "dataset_dict.json").is_file():  # DatasetDict.save_to_disk
        return local_data(path / "train")
    files = [path] if path.is_file() else _files_in(path)
    if not files:
        raise FileNotFoundError(f"{path} holds no {_SUFFIXES} file")
    if path.is_file() and path.suffix.lower() not in KINDS:
        raise ValueError(f"{path} is none of {_SUFFIXES}")
    kinds = Counter(KINDS[file.suffix.lower()] for file in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(f"{path} mixes file types: {counts}; list the files as separate entries of dataset")
    return LocalData(kind=next(iter(kinds)), files=tuple(files))


def _files_in(folder: Path) -> list[Path]:
    """Return the data files in a folder and its subfolders, ordered by name. Raises ValueError where some data files
    cannot be read, or where the file names show a train split beside other splits."""
    files = []
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "__")) for part in parts) or file.name in _NO_DATA
        if hidden or not file.is_file():
            continue
        if file.suffix.lower() in _PACKED and Path(file.stem).suffix.lower() in KINDS:
            raise ValueError(f"{folder} has {file.relative_to(folder)}, and packed files are not read; unpack it")
        if file.suffix.lower() in _NOT_READ:
            raise ValueError(f"{folder} has {file.relative_to(folder)}, and such tables are not read; take it out")
        if file.suffix.lower() in KINDS:
            files.append(file)
    names = [file.relative_to(folder).as_posix() for file in files]
    held_out = [name for name in names if _HELD_OUT.search(name)]
    if held_out and any(_TRAIN.search(name) for name in names):
        raise ValueError(
            f"{folder} has files to train on, and others by their names to test on: {', '.join(held_out[:5])}; name "
            "those that are meant as entries of dataset"
        )
    return files


def _saved(folder: Path) -> LocalData:
    """Return the dataset in a folder that `Dataset.save_to_disk` wrote, with the columns that its saved format selects.
    Raises ValueError."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        files = tuple(folder / file["filename"] for file in state["_data_files"])
        named = None if state.get("_output_all_columns") else state.get("_format_columns")
        columns = None if named is None else tuple(map(str, named))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}/state.json is not what Dataset.save_to_disk writes") from error
    if state.get("_indices_data_files"):
        raise ValueError(f"{folder} is a selection as `datasets` before 2.0 saved it; load it and save it anew")
    return LocalData(kind="arrow", files=files, columns=columns)

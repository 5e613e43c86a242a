"""Opens the records of one entry of a job's `dataset`: decides which files and which part of them are read, and reports
what cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.data.entry import DataEntry
from planner.data.local_data import LocalData, is_local, local_data
from planner.data.reader import Reader, Row
from planner.errors import Exit, UserError, disk_full, is_disk_full
from planner.hub import not_given
from planner.job.data_check import FirstRows, columns_of
from worker.data.hub_files import data_of_hub, first_rows_of_hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The records of one dataset of the job, in the order of its files.

    `columns`: those at the beginning of the data, by which a submission, too, recognizes what the records are. `parts`:
    (reader of files, number of the first record, number after the last one; None: up to the end)."""

    entry: DataEntry
    name: str
    columns: tuple[str, ...]
    parts: tuple[tuple[Reader, int, int | None], ...]

    def rows(self) -> Iterator[Row]:
        """Yield the records from the beginning; each call reads the files anew. Raises UserError for files that cannot
        be read."""
        with _refusals(self.entry):
            for reader, start, stop in self.parts:
                yield from reader.records(start, stop)


def open_source(entry: DataEntry) -> Source:
    """Open the records of the dataset `entry`: a file, a folder (its data files in order of their names), or a split of
    a hub dataset. A text file is one record. Raises UserError when nothing can be read."""
    _be_quiet()
    with _refusals(entry):
        names = re.findall(r"(?:^|\+)([\w.-]+)", entry.split)
        data = {name: _data(entry, name) for name in dict.fromkeys(names)}
        columns = dict.fromkeys(column for its in data.values() for column in columns_of(its))
        readers = {name: Reader(its) for name, its in data.items()}
        parts: list[tuple[Reader, int, int | None]] = [(readers[name], 0, None) for name in names]
        if "[" in entry.split:
            from datasets.arrow_reader import ReadInstruction

            counts = {name: reader.count() for name, reader in readers.items()}
            pieces: Any = ReadInstruction.from_spec(entry.split).to_absolute(counts)  # type: ignore[no-untyped-call]
            parts = [(readers[piece.splitname], piece.from_, piece.to) for piece in pieces]
    name = Path(entry.path).name if is_local(entry.path) else entry.path
    return Source(entry=entry, name=name, columns=tuple(columns), parts=tuple(parts))


def first_of_hub(entry: DataEntry, most: int) -> FirstRows | None:
    """The first `most` rows of a dataset of the hub, downloading no more than they need; None where the first rows
    cannot be had alone. Raises UserError where the hub does not give them, and for a name or split that the dataset
    does not have."""
    _be_quiet()
    with _refusals(entry):
        return first_rows_of_hub(entry, most)


def _data(entry: DataEntry, split: str) -> LocalData:
    if not is_local(entry.path):
        return data_of_hub(entry, split)
    if split != "train":
        raise ValueError(f"files have a split train only, and split is {entry.split}")
    return local_data(Path(entry.path))


def _be_quiet() -> None:
    from datasets import config  # late: importing datasets takes seconds
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each reading counts as a download on the hub


@contextmanager
def _refusals(entry: DataEntry) -> Iterator[None]:
    """Turns the errors that reading the entry raises into UserError."""
    from datasets.exceptions import DatasetGenerationError, DatasetsError

    name = entry.path
    try:
        yield
    except (DatasetsError, DatasetGenerationError, OSError, ValueError, RecursionError) as error:
        if is_disk_full(error):
            raise disk_full(error, f"a copy of the dataset {name}") from error
        if not is_local(name) and (refused := not_given(f"the dataset {name}", error)) is not None:
            raise refused from error
        raise UserError(
            f"Cannot read the dataset {name}.",
            code="dataset-unreadable",
            exit_code=Exit.USAGE,
            numbers=tuple(_causes(error)),
            hint="check the file's format (.jsonl: one JSON object per line), or the name and the network for a hub id",
        ) from error


def _causes(error: BaseException) -> list[str]:
    """The messages of the error and of its causes, one short line each, at most three."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < 3:
        text = str(cause).strip().splitlines()
        line = f"{type(cause).__name__}: {text[0][:300] if text else ''}"
        if line not in lines:
            lines.append(line)
        cause = cause.__cause__ or cause.__context__
    return lines

"""Where training data comes from: local files and folders, or the hub, read through `datasets`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import Exit, UserError

if TYPE_CHECKING:
    from datasets.arrow_dataset import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}

_OPTIONS: dict[str, dict[str, Any]] = {"text": {"sample_by": "document"}, "csv": {"keep_default_na": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Records of one entry of the job's `dataset`: rows as dictionaries, in the order of the files."""

    name: str
    columns: tuple[str, ...]
    records: Dataset


def open_source(entry: str) -> Source:
    """The records of a file, a folder (its data files in order of their names), or a hub id (its split "train").

    A text file is one document. Raises UserError when nothing can be read.
    """
    from datasets.exceptions import DatasetGenerationError, DatasetsError  # late: importing datasets takes seconds
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    path = Path(entry)
    try:
        records = _open_local(path) if path.exists() else _train_split(entry)
    except (DatasetsError, DatasetGenerationError, OSError, ValueError) as error:
        raise UserError(
            f"Cannot read the dataset {entry}.", code="dataset-unreadable", exit_code=Exit.USAGE,
            numbers=tuple(_causes(error)),
            hint="check the file's format (.jsonl: one JSON object per line), or the name and the network for a hub id",
        ) from error  # fmt: skip
    if not records:
        raise UserError(
            f"The dataset {entry} is empty.", code="empty-dataset", exit_code=Exit.USAGE, numbers=("0 records",),
            hint="give a file with at least one record",
        )  # fmt: skip
    return Source(name=path.name if path.exists() else entry, columns=tuple(records.column_names), records=records)


def _open_local(path: Path) -> Dataset | tuple[()]:
    from datasets.arrow_dataset import Dataset

    if path.is_dir() and (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return Dataset.load_from_disk(str(path))  # what Dataset.save_to_disk wrote
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in _BUILDERS)
    kinds = Counter(_BUILDERS.get(file.suffix.lower(), "") for file in files)
    if not kinds or "" in kinds:
        raise ValueError(f"no {', '.join(_BUILDERS)} file at {path}")
    if len(kinds) > 1:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise ValueError(f"the folder mixes file types: {found}; list the files as separate entries of `dataset`")
    builder = next(iter(kinds))
    return _train_split(builder, data_files=[str(file) for file in files], **_OPTIONS.get(builder, {}))


def _train_split(name: str, **options: Any) -> Dataset | tuple[()]:
    from datasets.load import load_dataset

    try:
        records: Dataset = load_dataset(name, split="train", **options)
    except StopIteration:  # what the JSON reader raises for files without a record
        return ()
    except ValueError as error:
        if "corresponds to no data" in str(error):  # what other readers raise
            return ()
        raise
    return records


def _causes(error: BaseException) -> list[str]:
    """The error's message and those of its causes, one short line each."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < 3:
        text = str(cause).strip().splitlines()
        line = f"{type(cause).__name__}: {text[0][:300] if text else ''}"
        if line not in lines:
            lines.append(line)
        cause = cause.__cause__ or cause.__context__
    return lines

"""Where training data comes from: local files and folders, or the hub, read through `datasets`."""

from __future__ import annotations

import csv
import hashlib
import logging
import os
import re
import tempfile
import warnings
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.disk import sync
from planner.errors import Exit, UserError, disk_full, is_disk_full
from planner.hub import check_reached, not_given
from planner.job.broken_rows import BrokenRows, no_records, pieces_of
from planner.job.data_check import FirstRows
from planner.job.data_entry import DataEntry
from planner.job.json_pieces import Piece
from planner.job.local_data import LocalData, csv_columns, is_local, local_data
from planner.job.records import Record

if TYPE_CHECKING:
    from datasets.arrow_dataset import Dataset
    from datasets.builder import DatasetBuilder


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Records of one entry of the job's `dataset`: rows as dictionaries, in the order of the files."""

    name: str
    columns: tuple[str, ...]
    records: Dataset


def open_source(entry: DataEntry, broken: BrokenRows | None = None) -> Source:
    """The records of a file, a folder (its data files in order of their names), or a hub id: its split.

    A text file is one document. Lines of a JSON file that are no records are among the `broken` where these are left
    out. Raises UserError when nothing can be read.
    """
    from datasets import config
    from datasets.exceptions import DatasetGenerationError, DatasetsError  # late: importing datasets takes seconds
    from datasets.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    # Else the hub is asked to count each reading, of one's own files too; where nobody answers that takes seconds.
    config.HF_UPDATE_DOWNLOAD_COUNTS = False
    name, path = entry.path, Path(entry.path)
    if not is_local(name):
        _check_reached(entry)
    before = broken.met if broken is not None else 0
    try:
        records = _part(_open_local(path, broken), entry.split) if is_local(name) else _hub(entry)
    except (DatasetsError, DatasetGenerationError, OSError, ValueError, RecursionError, csv.Error) as error:
        if is_disk_full(error):
            raise disk_full(error, f"a copy of the dataset {name}") from error
        if not is_local(name) and (refused := not_given(_its_name(entry), error)) is not None:
            raise refused from error
        raise _unreadable(name, error) from error
    if not records:
        raise no_records(name, left_out=broken.met - before if broken is not None else 0)
    return Source(name=path.name if is_local(name) else name, columns=tuple(records.column_names), records=records)


def first_of_hub(entry: DataEntry, most: int) -> FirstRows | None:
    """The first `most` records of a dataset of the hub, of which no more is downloaded than they need; where the hub is
    not to be asked, of what is on this machine. None where they are not to be had like this: of a part of a split, and
    where `datasets` cannot stream them. Raises UserError where the hub does not give them, and for a name or split that
    the dataset does not have."""
    from datasets.exceptions import DatasetsError
    from datasets.load import load_dataset
    from datasets.utils.tqdm import disable_progress_bars
    from huggingface_hub import constants

    disable_progress_bars()
    if not re.fullmatch(r"[\w.-]+", entry.split):
        return None
    _check_reached(entry)
    try:
        load: Any = load_dataset
        stream = load(entry.path, split=entry.split, streaming=not constants.HF_HUB_OFFLINE, **_named(entry))
    except (DatasetsError, OSError, ValueError) as error:
        if (refused := not_given(_its_name(entry), error)) is not None:
            raise refused from error
        raise _unreadable(entry.path, error) from error
    try:
        rows: list[Record] = list(islice(iter(stream), most + 1))
    except Exception as error:  # files that can be read whole only, of any kind of reader; the job reads them so
        log.info("data: the first records of %s cannot be streamed: %s", entry.path, error)
        return None
    columns = tuple(stream.column_names or (rows[0] if rows else ()))
    placed = tuple((f"record {number} of {entry.path}", row) for number, row in enumerate(rows[:most], start=1))
    return FirstRows(columns=columns, rows=placed, whole=len(rows) <= most) if rows else None


def _its_name(entry: DataEntry) -> str:
    return f"the dataset {entry.path}"


def _check_reached(entry: DataEntry) -> None:
    check_reached(_its_name(entry), entry.path, "dataset")


def _open_local(path: Path, broken: BrokenRows | None) -> Dataset | tuple[()]:
    from datasets.arrow_dataset import Dataset
    from datasets.exceptions import DatasetGenerationError

    data = local_data(path)
    if data.kind == "saved":
        return Dataset.load_from_disk(str(path))
    read, files = partial(_train_split, data.kind, **_options(data)), [*map(str, data.files)]
    if data.kind != "json" or broken is None:
        return read(data_files=files)
    if broken.skip:
        return read(data_files=[str(_lined(file, broken)) for file in data.files])
    try:
        return read(data_files=files)
    except DatasetGenerationError:  # objects over several lines are read where they happen to end with a block
        lined = [str(_lined(file, broken)) for file in data.files]
        broken.refuse(broken.met)
        if lined == files:
            raise
        log.info("data: %s is read from a copy with a record on each line", path.name)
    return read(data_files=lined)


def _lined(file: Path, broken: BrokenRows) -> Path:
    """The file, or where it has lines that are no records, and records of several lines, a copy with its records on a
    line each. It stays beside what `datasets` keeps of it, under a name by its content: read again it is found, and so
    is that."""
    from datasets import config

    digest, is_lined = hashlib.blake2b(digest_size=16), True
    for piece in pieces_of(file):
        is_lined &= piece.wrong is None and piece.lines == 1
        if piece.wrong is None:
            digest.update(_line(piece))
        else:
            broken.add(partial(str, piece.place), ValueError(f"it is {piece.wrong}"))
    if is_lined:
        return file
    kept = Path(config.HF_DATASETS_CACHE) / "offmate-lines" / digest.hexdigest() / file.name
    if kept.exists():
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        copy, again = Path(folder) / file.name, hashlib.blake2b(digest_size=16)
        with copy.open("wb") as lines:
            for line in (_line(piece) for piece in pieces_of(file) if piece.wrong is None):
                lines.write(line)
                again.update(line)
        if again.digest() != digest.digest():
            raise ValueError(f"{file.name} changed while it was read")
        os.utime(copy, (0, 0))  # `datasets` knows a file by its path and this time
        sync(copy)
        copy.replace(kept)
    return kept


def _line(piece: Piece) -> bytes:
    return f"{piece.text}\n".encode()


def _part(records: Dataset | tuple[()], split: str) -> Dataset | tuple[()]:
    """The records that a split like "train[:1%]" means."""
    if not records or split == "train":
        return records
    from datasets.arrow_reader import ReadInstruction

    pieces: Any = ReadInstruction.from_spec(split).to_absolute({"train": len(records)})  # type: ignore[no-untyped-call]
    part: Dataset = records.select([number for piece in pieces for number in range(piece.from_, piece.to)])
    return part


def _hub(entry: DataEntry) -> Dataset | tuple[()]:
    return _train_split(entry.path, split=entry.split, **_named(entry))


def _named(entry: DataEntry) -> dict[str, Any]:
    options: dict[str, Any] = {"data_files": list(entry.data_files)} if entry.data_files else {}
    others = (("data_dir", entry.data_dir), ("name", entry.name), ("revision", entry.revision))
    return options | {key: value for key, value in others if value is not None}


def _unreadable(name: str, error: BaseException) -> UserError:
    return UserError(
        f"Cannot read the dataset {name}.", code="dataset-unreadable", exit_code=Exit.USAGE,
        numbers=tuple(_causes(error)),
        hint="check the file's format (.jsonl: one JSON object per line), or the name and the network for a hub id",
    )  # fmt: skip


def _options(data: LocalData) -> dict[str, Any]:
    """How the reader of such files is to read them."""
    if data.kind == "text":
        return {"sample_by": "document"}
    if data.kind != "csv":
        return {}
    import pyarrow as pa
    from datasets.features import Features

    # A "4" is text, as is an "NA", and a row with too many fields is an error, none of which the reader does by itself.
    texts = Features.from_arrow_schema(pa.schema([(column, pa.string()) for column in csv_columns(data.files)]))
    return {"features": texts or None, "keep_default_na": False, "index_col": False}


def _train_split(path: str, *, split: str = "train", **options: Any) -> Dataset | tuple[()]:
    from datasets.load import load_dataset_builder

    try:
        with warnings.catch_warnings():
            # All rows have fields too many.
            warnings.filterwarnings("error", "Length of header or names does not match")
            builder = _of_commit(load_dataset_builder(path, **options), options.get("revision"))
            builder.download_and_prepare()
            records: Any = builder.as_dataset(split=split)
    except StopIteration:  # what the JSON reader raises for files without a record
        return ()
    except ValueError as error:
        if "corresponds to no data" in str(error):  # what other readers raise
            return ()
        raise
    found: Dataset = records
    return found


def _of_commit(builder: DatasetBuilder, revision: str | None) -> DatasetBuilder:
    """The builder of a dataset at a commit: where the hub is not reached, `datasets` gives what this machine has of the
    newest, whatever was asked for. Raises ConnectionError where this machine has nothing of the commit."""
    from datasets.packaged_modules.cache.cache import Cache

    if not isinstance(builder, Cache) or not re.fullmatch("[0-9a-f]{40}", revision or ""):
        return builder
    folder = Path(builder.cache_dir).with_name(str(revision))
    if not folder.is_dir():
        raise ConnectionError(f"the hub is not reached, and this machine has no commit {revision} of {builder.repo_id}")
    config, version, commit = folder.parts[-3:]
    return Cache(
        dataset_name=builder.dataset_name, repo_id=builder.repo_id, config_name=config, version=version, hash=commit
    )


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

"""Finds and downloads the files of a dataset of the Hugging Face hub with `datasets`; they are then read like local
files (`planner.data.reader`)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.data.entry import DataEntry
from planner.data.local_data import LocalData
from planner.data.reader import Row, rows_of
from planner.disk import sync
from planner.hub import check_reached
from planner.job.data_check import FirstRows
from planner.keys.source import shown

if TYPE_CHECKING:
    from datasets.builder import DatasetBuilder

log = logging.getLogger(__name__)

_GUESSING = ("json", "csv")
"""Readers of `datasets` that guess column types from the content; their files are read only by offmate's own reader."""
_TABLES = ("parquet", "arrow")
_READ_HERE = {
    "json": {"chunksize", "block_size", "use_threads", "newlines_in_values", "on_mixed_types", "parse_agent_traces"},
    "csv": {"sep", "delimiter", "chunksize", "engine", "memory_map", "keep_default_na", "na_filter", "na_values"},
    "parquet": {"batch_size"},
    "arrow": set[str](),
}
"""Reader -> settings of a dataset's card that do not change what the records are, or that are honoured here."""
_OF_ALL = {"name", "version", "data_dir", "data_files", "description", "features"}


def data_of_hub(entry: DataEntry, split: str) -> LocalData:
    """The files of the split `split` of a hub dataset, downloaded. The files already on this machine are used where the
    hub may not be contacted, or where the entry names a commit that was read before. Raises ConnectionError, OSError,
    ValueError and errors of `datasets`."""
    if (recorded := _kept(entry, split)) is not None:
        return recorded
    builder = _builder(entry)
    if not _is_read_here(builder):
        return LocalData(kind="arrow", files=_prepared(builder, split))
    from datasets.download.download_config import DownloadConfig
    from datasets.download.download_manager import DownloadManager

    config = DownloadConfig(use_etag=False, token=builder.token, storage_options=builder.storage_options)
    manager: Any = DownloadManager(
        dataset_name=builder.dataset_name, download_config=config, base_path=builder.base_path
    )
    paths = manager.iter_files(manager.download_and_extract(_urls(builder, split)))
    data = LocalData(kind=builder.name, files=tuple(map(Path, paths)), delimiter=_delimiter(builder))  # type: ignore[arg-type]
    if re.fullmatch("[0-9a-f]{40}", builder.hash or ""):
        _keep(entry, split, str(builder.hash), data)
    return data


def first_rows_of_hub(entry: DataEntry, most: int) -> FirstRows | None:
    """The first `most` rows of a hub dataset's split, downloading no more than they need; where the hub may not be
    contacted, they come from files on this machine. None where the first rows cannot be had alone: for a part of a
    split, and for files that can only be read whole. Raises as `data_of_hub` does."""
    from huggingface_hub import constants

    if not re.fullmatch(r"[\w.-]+", entry.split):
        return None
    if constants.HF_HUB_OFFLINE and (recorded := _kept(entry, entry.split)) is not None:
        opened = ((file.name, file.open("rb")) for file in recorded.files)
        return _first(opened, recorded.kind, recorded.delimiter, most)
    builder = _builder(entry)
    if not _is_read_here(builder):
        return None
    from datasets.download.download_config import DownloadConfig
    from datasets.download.streaming_download_manager import StreamingDownloadManager
    from datasets.utils.file_utils import xopen

    config = DownloadConfig(token=builder.token, storage_options=builder.storage_options)
    manager: Any = StreamingDownloadManager(
        base_path=builder.base_path, download_config=config, dataset_name=builder.dataset_name
    )
    urls = manager.iter_files(manager.download_and_extract(_urls(builder, entry.split)))
    files = ((url.rpartition("/")[2], xopen(url, "rb", download_config=config)) for url in urls)
    return _first(files, builder.name, _delimiter(builder), most)


def _first(files: Iterator[tuple[str, Any]], kind: Any, delimiter: str, most: int) -> FirstRows | None:
    columns: dict[str, None] = {}
    rows: list[Row] = []
    for name, file in files:
        with file:
            for row in islice(rows_of(name, file, kind, columns=columns, delimiter=delimiter), most + 1 - len(rows)):
                columns |= dict.fromkeys(row.record or ())
                rows.append(row)
        if len(rows) > most:
            break
    return FirstRows(columns=tuple(columns), rows=tuple(rows[:most]), whole=len(rows) <= most) if rows else None


def _builder(entry: DataEntry) -> DatasetBuilder:
    """The builder of `datasets` for a dataset. Where the hub is not reached, `datasets` gives what this machine has of
    the newest commit, whatever was asked for; if the entry names a commit, this function takes that one instead. Raises
    ConnectionError where this machine does not have it, or has only data made by a reader that guesses."""
    from datasets.load import load_dataset_builder
    from datasets.packaged_modules.cache.cache import Cache

    options: dict[str, Any] = {"data_files": list(entry.data_files)} if entry.data_files else {}
    others = (("data_dir", entry.data_dir), ("name", entry.name), ("revision", entry.revision))
    options |= {key: value for key, value in others if value is not None}
    check_reached(f"the dataset {entry.path}", entry.path, "dataset")
    builder = load_dataset_builder(entry.path, **options)
    if not isinstance(builder, Cache):
        return builder
    if re.fullmatch("[0-9a-f]{40}", entry.revision or ""):
        folder = Path(builder.cache_dir).with_name(str(entry.revision))
        if not folder.is_dir():
            missing = f"this machine has no commit {entry.revision} of {builder.repo_id}"
            raise ConnectionError(f"the hub is not reached, and {missing}")
        config, version, commit = folder.parts[-3:]
        builder = Cache(
            dataset_name=builder.dataset_name, repo_id=builder.repo_id, config_name=config, version=version, hash=commit
        )
    if builder.info.builder_name in _GUESSING:
        raise ConnectionError(
            f"the hub is not reached, and what this machine has of {builder.repo_id} was made by a reader that guesses"
        )
    return builder


def _is_read_here(builder: DatasetBuilder) -> bool:
    """Whether offmate's own reader reads the files; else `datasets` makes tables of them. Raises ValueError for a
    setting of a dataset's card that only a guessing reader of `datasets` would honour."""
    if builder.name not in (*_GUESSING, *_TABLES):
        return False
    config, usual = builder.config, type(builder.config)()
    known = _READ_HERE[builder.name] | _OF_ALL
    changed = [
        f.name for f in fields(config) if f.name not in known and getattr(config, f.name) != getattr(usual, f.name)
    ]
    if changed and builder.name in _GUESSING:
        raise ValueError(
            f"the dataset's card says {changed[0]} of its {builder.name} files, which is not honoured: download them, "
            "and give their folder as dataset, in a form without it"
        )
    return not changed


def _delimiter(builder: DatasetBuilder) -> str:
    delimiter = str(getattr(builder.config, "sep", ","))
    if len(delimiter) != 1:
        raise ValueError(f"the dataset's card parts cells by {shown(delimiter)}, and not by one character")
    return delimiter


def _urls(builder: DatasetBuilder, split: str) -> list[str]:
    files = builder.config.data_files
    if not isinstance(files, dict) or split not in files:
        raise ValueError(f"there is no split {split}; there are {', '.join(map(str, files or ()))}")
    return [*map(str, files[split])]


def _prepared(builder: DatasetBuilder, split: str) -> tuple[Path, ...]:
    """The table files that `datasets` makes of a split; empty for a split without data."""
    builder.download_and_prepare()
    try:
        dataset: Any = builder.as_dataset(split=split)
    except ValueError as error:
        if "corresponds to no data" in str(error):
            return ()
        raise
    return tuple(Path(file["filename"]) for file in dataset.cache_files)


def _place(entry: DataEntry, split: str) -> Path:
    """The folder that records which files a split has, in one file for each commit."""
    from datasets import config

    key = json.dumps([entry.path, entry.name, entry.data_dir, entry.data_files, split])
    return Path(config.HF_DATASETS_CACHE) / "offmate-files" / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _keep(entry: DataEntry, split: str, commit: str, data: LocalData) -> None:
    place = _place(entry, split)
    place.mkdir(parents=True, exist_ok=True)
    record = {"kind": data.kind, "delimiter": data.delimiter, "files": [str(file) for file in data.files]}
    temporary = place / f".{commit}.{os.getpid()}"
    temporary.write_text(json.dumps(record), "utf-8")
    sync(temporary)
    temporary.replace(place / f"{commit}.json")


def _kept(entry: DataEntry, split: str) -> LocalData | None:
    """The files recorded for the entry's commit. Where the entry names no commit and the hub must not be asked, those
    of the last recorded one. None where nothing is recorded, or a file is gone."""
    from huggingface_hub import constants

    place, revision = _place(entry, split), entry.revision or ""
    if re.fullmatch("[0-9a-f]{40}", revision):
        records = [place / f"{revision}.json"]
    else:
        records = (
            sorted(place.glob("*.json"), key=lambda file: file.stat().st_mtime) if constants.HF_HUB_OFFLINE else []
        )
    with suppress(OSError, ValueError, KeyError, IndexError):
        record = json.loads(records[-1].read_text("utf-8"))
        files = tuple(map(Path, record["files"]))
        if all(file.is_file() for file in files):
            return LocalData(kind=record["kind"], files=files, delimiter=record["delimiter"])
    return None

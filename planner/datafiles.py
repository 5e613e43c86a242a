"""A job's data files, looked at before the job is taken in: do they open, do their records say what they are? No torch.

Only what the trainer would refuse is refused here, so that it is told now and not when the job has its turn. Of large
files the beginning is read. What can be told by the tokenizer only, or of a dataset of the hub, stays for the trainer.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.codec import json_object
from planner.errors import Exit, UserError, first_line
from planner.job import Job
from planner.jobpaths import DATA_SUFFIXES
from planner.records import Record, check_record, is_chat, kind_of

MOST_BYTES = 32 * 2**20
"""Read of each entry of `dataset`: about a second."""

_NO_TEMPLATE = "The data are conversations, and the tokenizer has no chat template."
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A record and where it is: "line 3 of a.jsonl"."""

    place: str
    record: Record


@dataclass(slots=True, kw_only=True)
class _Found:
    """What was read of an entry: `rows` to look into, `count` of records (rows included), all `columns`. `whole`: it
    was read to its end, in no more than `left_bytes`."""

    rows: list[_Row]
    columns: dict[str, None]
    left_bytes: int
    count: int = 0
    whole: bool = True


def check_data(job: Job) -> tuple[str, ...]:
    """Look at the data of a job. Returns the entries that are of the hub, which nobody has looked at. Raises UserError
    (exit 2) with the codes of the trainer."""
    corpora = (job.dataset, job.eval_dataset or ())
    for entries in corpora:
        empty = {entry: _check_entry(Path(entry), job) if entry.startswith("/") else None for entry in entries}
        if empty and None not in empty.values():
            raise UserError(
                "The dataset has nothing to train on.", code="nothing-to-train", exit_code=Exit.USAGE,
                numbers=tuple(f"{entry}: {count} records, all of them empty" for entry, count in empty.items()),
                hint="give data with texts to learn",
            )  # fmt: skip
    return tuple(entry for entries in corpora for entry in entries if not entry.startswith("/"))


def _check_entry(path: Path, job: Job) -> int | None:
    """How many records there are when every one of them is empty; None where there may be something to learn."""
    if path.is_dir() and (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return None  # what Dataset.save_to_disk wrote
    found = _Found(rows=[], columns={}, left_bytes=MOST_BYTES)
    for file in _files(path):
        _read(file, found, path)
    if not found.count and found.whole:
        raise UserError(
            f"The dataset {path} is empty.", code="empty-dataset", exit_code=Exit.USAGE, numbers=("0 records",),
            hint="give a file with at least one record",
        )  # fmt: skip
    if not found.columns:
        return None
    kind = kind_of(tuple(found.columns), path.name)
    learned = False
    for row in found.rows:
        try:
            learned |= check_record(kind, row.record)
        except ValueError as error:
            raise UserError(
                f"A record of {path.name} is broken.", code="broken-record", exit_code=Exit.USAGE,
                numbers=(f"{row.place}: {error}",), hint="correct the record or take it out",
            ) from error  # fmt: skip
        if is_chat(kind, row.record) and not _has_template(job):
            raise UserError(
                _NO_TEMPLATE, code="no-chat-template", exit_code=Exit.USAGE, numbers=(row.place,),
                hint="give chat_template, the path of a Jinja template, in the job file",
            )  # fmt: skip
    return found.count if found.whole and found.count == len(found.rows) and not learned else None


def _files(path: Path) -> Sequence[Path]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in DATA_SUFFIXES)
    kinds = Counter("json" if file.suffix.lower() == ".jsonl" else file.suffix.lower()[1:] for file in files)
    if len(kinds) > 1:
        numbers = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise _unreadable(path, f"the folder mixes file types: {numbers}", "list the files as separate entries")
    return files


def _read(file: Path, found: _Found, entry: Path) -> None:
    """Add the records of a file to what was found, as far as its first bytes go."""
    try:
        if file.suffix.lower() == ".parquet":
            _read_parquet(file, found)
        else:
            text = _beginning(file, found)
            {".csv": _read_csv, ".txt": _read_txt}.get(file.suffix.lower(), _read_json)(file, text, found)
    except UnicodeDecodeError as error:
        raise _unreadable(entry, f"{file.name} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}",
                          "save it as UTF-8") from error  # fmt: skip
    except csv.Error:  # pandas may read it
        found.whole = False
    except (OSError, ValueError, RecursionError) as error:
        hint = "check the file's format" + (" (one JSON object per line)" if file.suffix.lower() == ".jsonl" else "")
        raise _unreadable(entry, first_line(error), hint) from error


def _beginning(file: Path, found: _Found) -> str:
    """The file's text; of a large file the whole lines at its beginning."""
    with file.open("rb") as content:
        piece = content.read(found.left_bytes)
        if content.read(1):
            piece = piece[: piece.rfind(b"\n") + 1]
            found.whole = False
    found.left_bytes -= len(piece)
    return piece.decode("utf-8-sig")


def _read_txt(file: Path, text: str, found: _Found) -> None:
    found.count += 1
    found.columns["text"] = None
    found.rows.append(_Row(place=file.name, record={"text": text}))


def _read_csv(file: Path, text: str, found: _Found) -> None:
    lines = io.StringIO(text, newline="")
    found.columns |= dict.fromkeys(next((row for row in csv.reader(lines) if row), []))
    found.count += any(line.strip() for line in lines)  # at least


def _read_parquet(file: Path, found: _Found) -> None:
    from pyarrow import parquet  # late: it is large, and hardly anybody needs it

    with parquet.ParquetFile(file) as content:
        found.columns |= dict.fromkeys(content.schema_arrow.names)
        found.count += content.metadata.num_rows


def _read_json(file: Path, text: str, found: _Found) -> None:
    if text[:100].lstrip().startswith("["):
        if found.whole:
            values = json.loads(text)
            texts = all(isinstance(value, str) for value in values)
            records = [{"text": value} for value in values] if texts else values
            _add(((f"record {number} of {file.name}", record) for number, record in enumerate(records, 1)), found)
        return
    try:
        _add(_lines(file, text), found)
    except ValueError:
        if (record := json_object(text)) is None:
            raise
        _add([(file.name, record)], found)


def _lines(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The values of the lines and where they are; a line may have several."""
    decoder = json.JSONDecoder()
    for number, line in enumerate(text.split("\n"), start=1):
        place, rest = f"line {number} of {file.name}", line.strip()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is no JSON: {error.msg} (character {error.pos + 1})") from None
            yield place, value
            rest = rest[end:].lstrip()


def _add(values: Iterable[tuple[str, Any]], found: _Found) -> None:
    rows = []
    for place, value in values:
        if not isinstance(value, dict | None):
            raise ValueError(f"{place} is no object with columns: {str(value)[:80]}")
        rows.append(_Row(place=place, record=value or {}))
    found.rows += rows
    found.count += len(rows)
    for row in rows:
        found.columns |= dict.fromkeys(row.record)


def _has_template(job: Job) -> bool:
    """Whether there may be a chat template: the job's, or one in the tokenizer's folder."""
    folder = Path(job.tokenizer)
    if job.chat_template is not None or not folder.is_absolute():
        return True
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # whoever loads it will say what is wrong with it
        return True


def _unreadable(path: Path, number: str, hint: str) -> UserError:
    return UserError(
        f"Cannot read the dataset {path}.",
        code="dataset-unreadable",
        exit_code=Exit.USAGE,
        numbers=(number,),
        hint=hint,
    )

"""A job's data files, looked at before the job is taken in: do they open, do their records say what they are? No torch.

Only what the trainer would refuse is refused here, so that it is told now and not when the job has its turn. Of large
files the beginning is read. What can be told by the tokenizer only, or of a dataset of the hub, stays for the trainer.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from planner.errors import Exit, UserError, first_line
from planner.job.broken_rows import SHOWN, BrokenRows, no_records
from planner.job.data_entry import DataEntry
from planner.job.dataset_words import LEARNED_KEYS
from planner.job.json_pieces import json_pieces
from planner.job.local_data import Kind, csv_columns, csv_rows, is_local, local_data
from planner.job.records import Kind as RecordKind
from planner.job.records import Record, check_record, is_chat, kind_of, no_columns
from planner.job.schema import Job
from planner.job.slot_rows import check as check_of_llama_factory
from planner.job.templates import GIVE_TEMPLATE

MOST_BYTES = 32 * 2**20
"""Read of each entry of `dataset`: about a second."""

_ROWS = 1000  # read of a parquet file, whose columns tell the rest
_GLANCE_BYTES = 2**16  # which mostly has a row, and so the columns

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
    was read to its end, in no more than `left_bytes`. `broken`: what is left out, lines that are no records first."""

    rows: list[_Row]
    columns: dict[str, None]
    left_bytes: int
    count: int = 0
    whole: bool = True
    broken: BrokenRows


class _WrongLines(ValueError):
    """Lines of a file that are no records."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(lines[0])
        more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        self.lines = (*lines[:SHOWN], *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """What a local entry begins with: records, each with its place ("line 3 of a.jsonl"), under the data's own names,
    and all `columns`. `whole`: there are no more."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, Record], ...]
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """What a file begins with; `whole`: all there is."""

    file: str
    content: bytes
    whole: bool

    @property
    def text(self) -> str:
        return self.content.decode("utf-8-sig")


def check_data(job: Job) -> tuple[str, ...]:
    """Look at the data of a job. Returns the entries that are of the hub, which nobody has looked at. Raises UserError
    (exit 2) with the codes of the trainer."""
    corpora = (job.data, job.eval_data)
    for entries in corpora:
        useless = [_check_entry(entry, job) if is_local(entry.path) else None for entry in entries]
        if useless and None not in useless:
            raise UserError(
                "The dataset has nothing to train on.", code="nothing-to-train", exit_code=Exit.USAGE,
                numbers=tuple(line for told in useless for line in told or ()), hint="give data with texts to learn",
            )  # fmt: skip
    return tuple(entry.path for entries in corpora for entry in entries if not is_local(entry.path))


def _check_entry(entry: DataEntry, job: Job) -> tuple[str, ...] | None:
    """What is told of an entry whose records are all empty or broken; None where there may be something to learn."""
    path = Path(entry.path)
    if not re.match(r"train(\[|$)", entry.split):
        hint = "files have a split train only, of which train[:10%] is a part; give other files as entries of their own"
        raise _unreadable(path, f"split is {entry.split}", hint)
    try:
        data = local_data(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, first_line(error), "give the path of data that is there") from error
    if data.kind == "saved":
        return None
    found = _Found(rows=[], columns={}, left_bytes=MOST_BYTES, broken=BrokenRows(skip=job.broken_rows == "skip"))
    for file in data.files:
        _read(file, data.kind, found, path)
    if data.kind == "csv":
        try:
            csv_columns(data.files)
        except (OSError, ValueError, csv.Error) as error:
            hint = "give all files the same columns, or list them as separate entries of dataset"
            raise _unreadable(path, first_line(error), hint) from error
    if not found.count and found.whole:
        raise no_records(path, left_out=len(found.broken))
    if not found.columns:
        return None
    kind = kind_in(entry, tuple(found.columns), path.name)
    learned, broken = False, found.broken
    # Of a part nobody knows here which rows are in it.
    rows = found.rows[: entry.most(job.max_samples)] if entry.whole else []
    for row in rows:
        try:
            learned |= (
                check_record(kind, entry.mapped(row.record)) if entry.formatting is None
                else check_of_llama_factory(kind, entry.mapped(row.record), entry.formatting)
            )  # fmt: skip
        except ValueError as error:
            broken.add(partial(str, row.place), error)
            continue
        if is_chat(kind, entry.mapped(row.record)) and not _has_template(job):
            raise UserError(
                _NO_TEMPLATE, code="no-chat-template", exit_code=Exit.USAGE, numbers=(row.place,),
                hint=GIVE_TEMPLATE,
            )  # fmt: skip
    broken.refuse(len(rows))
    seen = entry.whole and found.whole and found.count == len(found.rows)
    if not seen or learned:
        return None
    what = "broken or empty" if broken else "empty"
    return (f"{path}: {found.count} records, all of them {what}", *broken.lines)


def is_rendered(job: Job) -> bool:
    """Whether local data of a checked job are more than texts: a chat template or a prompt is around them, or not all
    of them is learned."""
    for entry in (*job.data, *job.eval_data):
        if not is_local(entry.path) or (data := local_data(Path(entry.path))).kind in ("saved", "text"):
            continue
        broken = BrokenRows(skip=job.broken_rows == "skip")
        found = _Found(rows=[], columns={}, left_bytes=_GLANCE_BYTES, broken=broken)
        _read(data.files[0], data.kind, found, Path(entry.path))
        if not found.columns or kind_in(entry, tuple(found.columns), entry.path) != "text":
            return True
    return False


def first_rows(
    entry: DataEntry, most: int, most_bytes: int = MOST_BYTES, *, broken: BrokenRows
) -> FirstRows | None:  # fmt: skip
    """The first `most` rows of an entry, of so many bytes; None where they are not to be had by reading a file: the
    hub's, those of a saved dataset, of which part of a split. Lines that are no records are among the `broken` where
    these are left out. Raises UserError."""
    if not is_local(entry.path) or not entry.whole or (data := local_data(Path(entry.path))).kind == "saved":
        return None
    found = _Found(rows=[], columns={}, left_bytes=most_bytes, broken=broken)
    for file in data.files:
        _read(file, data.kind, found, Path(entry.path))
        if len(found.rows) > most:
            break
    whole = found.whole and found.count <= most
    rows = tuple((row.place, row.record) for row in found.rows[:most])
    return FirstRows(columns=tuple(found.columns), rows=rows, whole=whole)


def kind_in(entry: DataEntry, columns: tuple[str, ...], name: str) -> RecordKind:
    """What the records of an entry are, by what it says or by their columns. Raises UserError."""
    try:
        names = entry.names(columns)
    except ValueError as error:
        raise no_columns(name, str(error)) from error
    kind = entry.kind or kind_of(names, name)
    if entry.learned is not None and kind not in ("messages", "conversations"):
        raise UserError(
            f"Which turns are learned is said of {name}, and its records are no conversations.",
            code="no-turns", exit_code=Exit.USAGE, numbers=(f"they are read as {kind}",),
            hint=f"leave {', '.join(LEARNED_KEYS)} and eot_tokens out of its entry",
        )  # fmt: skip
    return kind


def _read(file: Path, kind: Kind, found: _Found, entry: Path) -> None:
    """Add the records of a file to what was found, as far as its first bytes go."""
    try:
        if kind in ("parquet", "arrow"):
            (_read_parquet if kind == "parquet" else _read_arrow)(file, found)
        else:
            {"csv": _read_csv, "text": _read_txt}.get(kind, _read_json)(_beginning(file, found), found)
    except UnicodeDecodeError as error:
        raise _unreadable(entry, f"{file.name} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}",
                          "save it as UTF-8") from error  # fmt: skip
    except csv.Error:  # pandas may read it
        found.whole = False
    except (OSError, ValueError, RecursionError) as error:
        hint = "check the file's format"
        if isinstance(error, _WrongLines):
            hint = f"{hint} (one JSON object per line; broken_rows: skip leaves other lines out)"
            raise _unreadable(entry, error.lines, hint) from error
        raise _unreadable(entry, first_line(error), hint) from error


def _beginning(file: Path, found: _Found) -> _Text:
    """The file's text; of a large file the whole lines at its beginning."""
    with file.open("rb") as content:
        piece = content.read(found.left_bytes)
        whole = not content.read(1)
    if not whole:
        piece = piece[: piece.rfind(b"\n") + 1]
        found.whole = False
    found.left_bytes -= len(piece)
    return _Text(file=file.name, content=piece, whole=whole)


def _read_txt(text: _Text, found: _Found) -> None:
    found.count += 1
    found.columns["text"] = None
    found.rows.append(_Row(place=text.file, record={"text": text.text}))


def _read_csv(text: _Text, found: _Found) -> None:
    rows = csv_rows(io.StringIO(text.text, newline=""), whole=text.whole)
    _, columns = next(rows, (0, []))
    found.columns |= dict.fromkeys(columns)
    for number, row in rows:
        place = f"line {number} of {text.file}"
        if len(row) > len(columns):
            raise ValueError(f"{place} has {len(row)} fields for {len(columns)} columns: texts with commas need quotes")
        # Of two columns with one name the first counts.
        found.rows.append(_Row(place=place, record=dict(reversed(list(zip(columns, row, strict=False))))))
        found.count += 1


def _read_parquet(file: Path, found: _Found) -> None:
    from pyarrow import parquet  # late: it is large, and hardly anybody needs it

    with parquet.ParquetFile(file) as content:
        found.columns |= dict.fromkeys(content.schema_arrow.names)
        found.count += content.metadata.num_rows
        first = next(content.iter_batches(_ROWS), None)
    records = first.to_pylist() if first is not None else []
    found.rows += [_Row(place=f"row {n} of {file.name}", record=record) for n, record in enumerate(records, start=1)]


def _read_arrow(file: Path, found: _Found) -> None:
    import pyarrow as pa

    with pa.memory_map(str(file)) as content:
        try:
            table = pa.ipc.open_stream(content).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(content).read_all()
        found.columns |= dict.fromkeys(table.schema.names)
        found.count += table.num_rows
        records = table.slice(0, _ROWS).to_pylist()
    found.rows += [_Row(place=f"row {n} of {file.name}", record=record) for n, record in enumerate(records, start=1)]


def _read_json(text: _Text, found: _Found) -> None:
    wrong: list[str] = []
    for piece in json_pieces(text.file, io.BytesIO(text.content), whole=text.whole):
        for record in piece.records:
            found.rows.append(_Row(place=piece.place, record=record))
            found.columns |= dict.fromkeys(record)
        found.count += len(piece.records)
        if piece.wrong is not None:
            wrong.append(f"{piece.place} is {piece.wrong}")
            found.broken.add(partial(str, piece.place), ValueError(f"it is {piece.wrong}"))
    if wrong and not found.broken.skip:
        raise _WrongLines(wrong)


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


def _unreadable(path: Path, told: str | tuple[str, ...], hint: str) -> UserError:
    return UserError(
        f"Cannot read the dataset {path}.", code="dataset-unreadable", exit_code=Exit.USAGE, hint=hint,
        numbers=(told,) if isinstance(told, str) else told,
    )  # fmt: skip

"""Checks a job's data files when the job is submitted: whether they can be read, and whether their records have the
format that they should have. Does not import torch.

It refuses only what the trainer would refuse, so that the user learns it now and not when the job starts. Of large
files only the beginning is read. What needs the tokenizer, or a dataset on the hub, is left to the trainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from planner.data.broken_rows import BrokenRows, no_records
from planner.data.entry import DataEntry
from planner.data.local_data import LocalData, is_local, local_data
from planner.data.preference_records import answers_of
from planner.data.reader import Reader, Row
from planner.data.records import (
    PREFERENCES,
    Kind,
    check_answers,
    check_record,
    is_chat,
    kind_of,
    lacks_of,
    no_columns,
)
from planner.errors import Errors, Exit, UserError, first_line
from planner.importers.axolotl_data import LEARNED_KEYS
from planner.importers.llama_factory_records import check as check_of_llama_factory
from planner.importers.llama_factory_v1_records import check as check_of_v1
from planner.importers.templates import GIVE_TEMPLATE
from planner.job.schema import Job
from planner.units import counted

MOST_BYTES = 32 * 2**20
"""The most bytes that are read of each dataset, which takes about a second."""

_NO_TEMPLATE = "The data are conversations, and the tokenizer has no chat template."
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows:
    """The first rows of a dataset and the names of all its `columns`, as the data call them. `whole`: it has no more
    rows."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    whole: bool


def check_data(job: Job, looking_at: Callable[[str], None] = lambda _: None) -> tuple[str, ...]:
    """Check the local data of a job, and return the hub ids of its other datasets, which are not checked. `looking_at`
    is called with a text such as "the dataset /data/a.jsonl" before each dataset is read. Raises UserError (exit 2),
    with the codes that the trainer would give, for all datasets together."""
    corpora = (job.data, job.eval_data)
    wrong = Errors()
    for entries in corpora:
        useless: list[tuple[str, ...] | None] = []
        for entry in entries:
            lines = None
            if is_local(entry.path):
                looking_at(f"the dataset {entry.path}")
                with wrong.apart():
                    lines = _check_entry(entry, job)
            useless.append(lines)
        if useless and None not in useless:
            wrong.found.append(
                UserError(
                    "The dataset has nothing to train on.",
                    code="nothing-to-train",
                    exit_code=Exit.USAGE,
                    numbers=tuple(line for lines in useless for line in lines or ()),
                    hint="give records with texts or answers that are learned; offmate preview shows what is learned",
                )
            )
    wrong.refuse()
    return tuple(entry.path for entries in corpora for entry in entries if not is_local(entry.path))


def _check_entry(entry: DataEntry, job: Job) -> tuple[str, ...] | None:
    """Check one entry of the job's `dataset`. Returns lines that say so where all its records are empty or broken; None
    where there may be something to learn. Raises UserError."""
    path, broken = Path(entry.path), BrokenRows(skip=job.broken_rows == "skip")
    if not re.match(r"train(\[|$)", entry.split):
        hint = "local files have only the split train, or a part like train[:10%]; list other files as further entries"
        raise _unreadable(path, f"split is {entry.split}", hint)
    data, wrong = _local(path), Errors()
    reader, kind = Reader(data, MOST_BYTES), None
    with wrong.apart():
        kind = _kind(entry, data, job)
    if kind is None:  # the beginning has no record with a known column
        seen = 0
        for row in _rows(reader, path):
            seen += 1
            if row.record is None:
                broken.add_row(row)
            elif not wrong.found:
                kind_in(entry, (), path.name, job)
        if data.kind != "csv" or _separator(reader.columns) is None:  # else the wrong separator breaks every row
            with wrong.apart():
                broken.refuse(seen)
        wrong.refuse()
        if reader.whole:
            raise no_records(path, left_out=len(broken))
        return None
    if not entry.whole:  # it is not known here which records the part has
        return None
    has_template = entry.converter is not None or _has_template(job)  # v1 has a template for tokenizers that have none
    most, records, learned = entry.most(job.max_samples), 0, False
    for row in _rows(reader, path):
        if records == most:
            break
        records += row.record is not None
        met = broken.met
        if learns(entry, kind, row, broken):
            learned = True
            if not wrong.found:
                with wrong.apart():
                    check_answers(job.train_on, kind, entry.mapped(row.record or {}))
        if broken.met == met and not has_template and is_chat(kind, entry.mapped(row.record or {})):
            has_template = True  # reported once
            wrong.found.append(
                UserError(
                    _NO_TEMPLATE,
                    code="no-chat-template",
                    exit_code=Exit.USAGE,
                    numbers=(row.place,),
                    hint=GIVE_TEMPLATE,
                )
            )
    with wrong.apart():
        broken.refuse(records + broken.unread)
    wrong.refuse()
    if not records and reader.whole:
        raise no_records(path, left_out=len(broken))
    if learned or not reader.whole:
        return None
    what = "broken or empty" if broken else "empty"
    return (f"{path}: {counted(records, 'record')}, all of them {what}", *broken.lines)


def learns(entry: DataEntry, kind: Kind, row: Row, broken: BrokenRows) -> bool:
    """Return whether a row has something to learn, as far as this shows without a tokenizer. `kind`: the format of the
    entry's records. A broken row is added to `broken` and counts as having nothing."""
    if row.record is None:
        broken.add_row(row)
        return False
    try:
        record = entry.mapped(row.record)
        if entry.converter is not None:
            return check_of_v1(entry.converter, record)
        if entry.formatting is not None:
            return check_of_llama_factory(kind, record, entry.formatting)
        if kind == "preference" or kind == "unpaired":
            answers_of(kind, record)
            return True
        learned = check_record(kind, record)
        if not learned and (lacks := lacks_of(kind, record)):
            broken.add_lacking(row.place, lacks)
        return learned
    except ValueError as error:
        broken.add(row.place, error)
        return False


def is_rendered(job: Job) -> bool:
    """Return whether any local data of a checked job are more than plain texts: whether a chat template or a prompt
    surrounds them, or only parts of them are learned."""
    local = (entry for entry in (*job.data, *job.eval_data) if is_local(entry.path))
    return any(_kind(entry, local_data(Path(entry.path)), job) not in (None, "text") for entry in local)


def count_of_few(entry: DataEntry, most: int, most_bytes: int) -> int | None:
    """Return the number of records of a small dataset. None where it has more than `most` records or `most_bytes`
    bytes, is on the hub or only a part of a split, or where a record makes several rows (`converter`). Raises
    UserError."""
    if not is_local(entry.path) or not entry.whole or entry.converter is not None:
        return None
    path, count = Path(entry.path), 0
    reader = Reader(_local(path), most_bytes)
    for row in _rows(reader, path):
        count += row.record is not None
        if count > most:
            return None
    return count if reader.whole else None


def first_rows(entry: DataEntry, most: int) -> FirstRows | None:
    """Return the first `most` rows of a dataset; None for a dataset on the hub, and for a part of a split. Raises
    UserError."""
    if not is_local(entry.path) or not entry.whole:
        return None
    path = Path(entry.path)
    data = _local(path)
    reader = Reader(data, MOST_BYTES)
    rows = (*islice(_rows(reader, path), most + 1),)
    return FirstRows(columns=columns_of(data), rows=rows[:most], whole=len(rows) <= most and reader.whole)


def columns_of(data: LocalData) -> tuple[str, ...]:
    """Return the names of the columns in the first `MOST_BYTES` of a dataset, which show the format of its records.
    Where these bytes have no column, return those of the first record that has any. Raises OSError, ValueError."""
    reader = Reader(data, MOST_BYTES)
    for _ in reader:
        pass
    if reader.columns or reader.whole:
        return tuple(reader.columns)
    return next((tuple(row.record) for row in Reader(data) if row.record), ())


def kind_in(entry: DataEntry, columns: tuple[str, ...], name: str, job: Job) -> Kind:
    """Return the format of an entry's records, as its `type` says or as their columns show. `name`: the dataset's name
    in errors. Raises UserError where the columns show no known format or do not fit the entry, and for records from
    which the job does not learn."""
    try:
        names = entry.names(columns)
    except ValueError as error:
        raise no_columns(name, str(error)) from error
    kind = entry.kind or kind_of(names, name, preferred=job.preference is not None)
    _check_preference(kind, entry, name, job)
    if entry.learned is not None and kind not in ("messages", "conversations"):
        raise UserError(
            f"The entry of {name} says which turns are learned, and its records are not conversations.",
            code="no-turns",
            exit_code=Exit.USAGE,
            numbers=(f"they are read as {kind}",),
            hint=f"leave {', '.join(LEARNED_KEYS)} and eot_tokens out of its entry",
        )
    return kind


def _check_preference(kind: Kind, entry: DataEntry, name: str, job: Job) -> None:
    """Raise UserError where the records are for a job with `preference`, and the job has none, or the other way
    round."""
    if job.preference is None and kind not in PREFERENCES:
        return
    if job.preference is None:
        pairs = "pairs of a chosen and a rejected answer", "give preference: dpo, or another loss that learns from them"
        one = "answers with a label that says whether they are good", "give preference: kto"
        what, hint = pairs if kind == "preference" else one
    elif kind == "unpaired" and job.preference != "kto":
        what = f"answers with a label, and preference: {job.preference} learns from pairs"
        hint = "give preference: kto, or a dataset with columns chosen and rejected"
    elif kind not in PREFERENCES or entry.converter is not None:
        what = f"no preferences, and preference: {job.preference} learns from these alone"
        hint = "give (prompt,) chosen and rejected, or with kto prompt, completion and label; or leave preference out"
    else:
        return
    raise UserError(
        f"The records of {name} are {what}.",
        code="other-records",
        exit_code=Exit.USAGE,
        numbers=(f"they are read as {kind}",),
        hint=hint,
    )


def _kind(entry: DataEntry, data: LocalData, job: Job) -> Kind | None:
    """Return the format of an entry's records; None where the beginning of its data has none. Raises UserError."""
    path = Path(entry.path)
    try:
        columns = columns_of(data)
    except (OSError, ValueError) as error:
        raise _unreadable(path, first_line(error), "check the file's format") from error
    try:
        return kind_in(entry, columns, path.name, job) if columns else None
    except UserError as error:
        if data.kind != "csv":
            raise
        hint = _csv_hint(columns, error.hint)
        raise UserError(
            error.what, code=error.code, exit_code=error.exit_code, numbers=error.numbers, hint=hint
        ) from error


def _csv_hint(columns: tuple[str, ...], otherwise: str) -> str:
    """The hint for a csv file whose first line names no known columns."""
    if (name := _separator(columns)) is not None:
        return f"its cells seem to be separated by {name}, and offmate reads commas only: save it with commas"
    return f"the first line of a csv file must name its columns, such as prompt,completion: add it; or {otherwise}"


def _separator(columns: Iterable[str]) -> str | None:
    """Return the character that seems to separate the cells of a CSV file, in words, if it is not a comma; else
    None."""
    names = [*columns]
    signs = ((";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars"))
    return next((name for sign, name in signs if len(names) == 1 and sign in names[0]), None)


def _local(path: Path) -> LocalData:
    try:
        return local_data(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, first_line(error), "give the path of data that is there") from error


def _rows(reader: Reader, path: Path) -> Iterator[Row]:
    """The rows of the dataset at `path`. Raises UserError."""
    try:
        yield from reader
    except (OSError, ValueError) as error:
        raise _unreadable(path, first_line(error), "check the file's format") from error


def _has_template(job: Job) -> bool:
    """Return whether there may be a chat template: the job's own, or one in the tokenizer's folder."""
    folder = Path(job.tokenizer)
    if job.chat_template is not None or not folder.is_absolute():
        return True
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("chat_template"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):  # loading it will report what is wrong
        return True


def _unreadable(path: Path, reason: str, hint: str) -> UserError:
    return UserError(
        f"Cannot read the dataset {path}.",
        code="dataset-unreadable",
        exit_code=Exit.USAGE,
        hint=hint,
        numbers=(reason,),
    )

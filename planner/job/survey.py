"""Looks at a dataset on this machine before there is a job for it: the format of its records, how many there are, which
are broken, and how long the longest is. Does not import torch.

It reads with the reader, and judges by the checks, that submission and training use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.data.broken_rows import BrokenRows, no_records
from planner.data.entry import DataEntry
from planner.data.local_data import local_data
from planner.data.preference_records import answers_of
from planner.data.reader import Reader
from planner.data.records import Kind, kind_of
from planner.errors import Exit, UserError, first_line
from planner.job.at_hand import MOST_BYTES
from planner.job.data_check import columns_of, learns
from planner.keys.preference import Preference
from planner.units import counted

_CONVERSATION = ("messages", "conversations", "history", "tools", "segments")
_TEXTS = {*_CONVERSATION, "text", "prompt", "completion", "system", "instruction", "input", "output"}
"""The columns whose texts become tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a dataset holds. `records`: those that are read, the `broken` ones among them; `lines`: one for each kind of
    mistake, with the place of the first record that has it. `longest`: the most bytes of a record's text in UTF-8, or
    its tokens where `kind` is "tokens"; its answer counts once where it has a chosen and a rejected one. `whole`: all
    records were read, and not only the first 64 MiB. `ignored`: columns that a job of this `preference` does not read,
    although their names say that they are meant for learning."""

    kind: Kind
    records: int
    broken: int
    lines: tuple[str, ...]
    longest: int
    whole: bool
    ignored: tuple[str, ...] = ()

    @property
    def preference(self) -> Preference | None:
        """The value of the job's key `preference` for such records: "dpo" for pairs of answers, else None."""
        return "dpo" if self.kind == "preference" else None


def survey(path: Path) -> Survey:
    """Return what the dataset at `path`, a file or a folder, holds. Raises UserError (exit 2) where it cannot be read,
    where its columns show no known format, and where no record has anything to learn."""
    entry, broken = DataEntry(path=str(path)), BrokenRows(skip=True)
    kind: Kind | None = None
    records, longest = 0, 0
    try:
        data = local_data(path)
        if columns := columns_of(data):
            kind = "preference" if {"chosen", "rejected"} <= set(columns) else kind_of(columns, path.name)
        reader = Reader(data, MOST_BYTES)
        for row in reader:
            records += 1
            if row.record is None:
                broken.add_row(row)
            elif kind is not None and learns(entry, kind, row, broken):
                longest = max(longest, _length(kind, row.record))
    except (OSError, ValueError) as error:
        raise UserError(
            f"Cannot read the dataset {path}.",
            code="dataset-unreadable",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint="give the path of data that is there, in a format that is read",
        ) from error
    if not records:
        raise no_records(path, left_out=0)
    if kind is None or not longest:
        raise UserError(
            "The dataset has nothing to train on.",
            code="nothing-to-train",
            exit_code=Exit.USAGE,
            numbers=(f"{path}: {counted(records, 'record')}, all of them broken or empty", *broken.lines),
            hint="correct them, or give other data",
        )
    return Survey(
        kind=kind,
        records=records,
        broken=len(broken),
        lines=broken.lines,
        longest=longest,
        whole=reader.whole,
        ignored=("label",) if kind == "prompt" and "label" in columns else (),
    )


def _length(kind: Kind, record: Mapping[str, object]) -> int:
    if kind == "tokens":
        tokens = record.get("input_ids")
        return len(tokens) if isinstance(tokens, list) else 0
    if kind == "preference":
        answers = answers_of(kind, record)
        return _bytes(answers.prompt) + max(_bytes(answers.chosen), _bytes(answers.rejected))
    return sum(_bytes(value) for column, value in record.items() if column in _TEXTS)


def _bytes(value: object) -> int:
    """The number of bytes of all texts in a JSON value, in UTF-8."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0

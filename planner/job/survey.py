"""Looks at a dataset on this machine before there is a job for it: the format of its records, how many there are, which
are broken, and how long the longest is. Does not import torch.

It reads with the reader, and judges by the checks, that submission and training use.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from planner.data.broken_rows import BrokenRows, no_records
from planner.data.entry import DataEntry
from planner.data.local_data import local_data
from planner.data.preference_records import answers_of
from planner.data.reader import Reader
from planner.data.records import Kind, is_chat, kind_of
from planner.errors import Exit, UserError, first_line
from planner.job.at_hand import MOST_BYTES
from planner.job.data_check import columns_of, learns
from planner.keys.preference import Preference
from planner.units import counted

_CONVERSATION = ("messages", "conversations", "history", "tools", "segments")
_TEXTS = {*_CONVERSATION, "text", "prompt", "completion", "system", "instruction", "input", "output"}
"""The columns whose texts become tokens."""
_PAIRS = (
    ("question", "answer"),
    ("question", "response"),
    ("query", "answer"),
    ("query", "response"),
    ("prompt", "answer"),
    ("prompt", "response"),
    ("instruction", "answer"),
    ("instruction", "response"),
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
)
"""Names of columns that hold a question and its answer. The file of `offmate init` reads them as instruction and
output."""

_SEVERAL = (
    "offmate init takes one file, or a folder with files of one type: give one file, or write the list of files into "
    "the job file by hand, as dataset: [a.json, b.txt]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a dataset holds. `records`: those that are read, the `broken` ones among them; `lines`: one for each kind of
    mistake, with the place of the first record that has it. `longest`: the most bytes of a record's text in UTF-8, or
    its tokens where `kind` is "tokens"; its answer counts once where it has a chosen and a rejected one. `whole`: all
    records were read, and not only the first 64 MiB. `ignored`: columns that a job of this `preference` does not read,
    although their names say that they are meant for learning. `entry`: what the entry of `dataset` must say beside the
    path, its `type` and `columns`; empty where the columns show the format. `as_they_are`: the records are prompts and
    completions as texts, which are joined without a chat template."""

    kind: Kind
    records: int
    broken: int
    lines: tuple[str, ...]
    longest: int
    whole: bool
    ignored: tuple[str, ...] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)
    as_they_are: bool = False

    @property
    def preference(self) -> Preference | None:
        """The value of the job's key `preference` for such records: "dpo" for pairs of answers, else None."""
        return "dpo" if self.kind == "preference" else None


def survey(path: Path) -> Survey:
    """Return what the dataset at `path`, a file or a folder, holds. Raises UserError (exit 2) where it cannot be read,
    where its columns show no known format, and where no record has anything to learn."""
    entry, broken = DataEntry(path=str(path)), BrokenRows(skip=True)
    kind: Kind | None = None
    records, longest, as_they_are = 0, 0, False
    try:
        data = local_data(path)
        if columns := columns_of(data):
            entry, kind = _entry_and_kind(path, columns)
        reader = Reader(data, MOST_BYTES)
        for row in reader:
            records += 1
            if row.record is None:
                broken.add_row(row)
            elif kind is not None and learns(entry, kind, row, broken):
                longest = max(longest, _length(kind, entry.mapped(row.record)))
                as_they_are |= kind == "prompt" and not is_chat(kind, row.record)
    except (OSError, ValueError) as error:
        several = isinstance(error, ValueError) and path.is_dir()
        raise UserError(
            f"Cannot read the dataset {path}.",
            code="dataset-unreadable",
            exit_code=Exit.USAGE,
            numbers=(first_line(error),),
            hint=_SEVERAL if several else "give the path of data that is there, in a format that is read",
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
        entry={"type": entry.type, "columns": dict(entry.columns)} if entry.columns else {},
        as_they_are=as_they_are,
    )


def _entry_and_kind(path: Path, columns: Collection[str]) -> tuple[DataEntry, Kind]:
    """The entry for the dataset at `path`, and the format of its records. The entry names the columns where they are a
    question and its answer. Raises UserError where the columns show no format."""
    if {"chosen", "rejected"} <= set(columns):
        return DataEntry(path=str(path)), "preference"
    try:
        return DataEntry(path=str(path)), kind_of(columns, path.name)
    except UserError as error:
        pairs = [pair for pair in _PAIRS if set(pair) <= set(columns)]
        if len(pairs) == 1:
            return DataEntry(path=str(path), **of_pair(*pairs[0])), "alpaca"
        if len(columns) < 2 or "input_ids" in columns:
            raise
        first, second, *_ = columns
        example = [{"path": path.name, **of_pair(first, second)}]
        written = yaml.safe_dump(
            example, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True
        ).strip()
        hint = f"write the job file by hand, and say in dataset what the columns are, such as dataset: {written}"
        raise UserError(
            error.what, code=error.code, exit_code=error.exit_code, numbers=error.numbers, hint=hint
        ) from error


def of_pair(question: str, answer: str) -> dict[str, Any]:
    """What an entry of `dataset` says beside its path, so that the columns called `question` and `answer` are read as
    instruction and output."""
    return {"type": "instructions", "columns": {"instruction": question, "output": answer}}


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

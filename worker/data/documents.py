"""Turns the records of a job's datasets, one dataset after another or mixed, into documents to be tokenized."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from planner.data.broken_rows import BrokenRows, no_records
from planner.data.entry import DataEntry
from planner.data.reader import Row
from planner.data.records import Kind
from planner.errors import UserError
from planner.job.data_check import kind_in
from planner.job.schema import Job
from planner.units import counted
from worker.data import v1_rows
from worker.data.first_token import first_token_of
from worker.data.formats import Document, Format, detect
from worker.data.pairs import entry_of_pairs
from worker.data.preference_formats import preference_format
from worker.data.sources import Source, open_source

log = logging.getLogger(__name__)

_UNTIL: dict[str, Any] = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}
"""`mix_strategy` -> the stopping strategy of `datasets`."""
_PIECE = 2**12  # how many records of a mixture are drawn at a time


def documents_of(job: Job, tokenizer: PreTrainedTokenizerBase, pairs: bool) -> Iterator[Document]:
    """Yield the documents of all the job's datasets, one after another or mixed as the job says. Empty records are left
    out. `pairs`: make prompt and completion for an encoder-decoder. Raises UserError for data that cannot be read or
    understood."""
    if job.mix_strategy != "concat" and len(job.data) > 1:
        yield from _mixed(job, tokenizer, pairs)
        return
    broken, yielded, seen = BrokenRows(skip=job.broken_rows == "skip"), 0, 0
    for entry in job.data:
        source, form = open_source(entry), None
        records, read, empty, before, most = 0, 0, 0, broken.met, entry.most(job.max_samples)
        for row in source.rows():
            if records == most or broken.is_full:
                break
            if row.record is None:
                broken.add_row(row)
                continue
            records += 1
            form = form or _form(job, source, tokenizer, pairs)  # only now: without records there may be no columns
            met = broken.met
            document = document_of(form, entry, row, broken)
            read += broken.met == met
            if document is None:
                empty += broken.met == met
            elif not broken.ends:
                yielded += 1
                yield replace(document, place=row.place)
        seen += records
        broken.refuse(seen + broken.unread)
        if not records or form is None:
            raise no_records(entry.path, left_out=broken.met - before)
        _tell(source, form, read)
        form.say_left_out(source.name)
        if empty := empty - form.left_out.total():
            log.warning("data: %s: %d of %d records are empty and left out", source.name, empty, records)
    broken.end(yielded, seen + broken.unread)


def _form(job: Job, source: Source, tokenizer: PreTrainedTokenizerBase, pairs: bool) -> Format:
    entry, kind = source.entry, kind_in(source.entry, source.columns, source.name, job)
    return form_of(job, entry, kind, entry.names(source.columns), tokenizer, pairs=pairs, source=source)


def _tell(source: Source, form: Format, records: int) -> None:
    used = {source.entry.columns.get(column, column) for column in form.uses}
    unused = [column for column in source.columns if column not in used]
    if "system" in unused and "messages" in form.uses and "system" not in source.entry.columns:
        log.warning("data: %s: the column system is not read; columns: {system: system} takes it", source.name)
    if "system" in unused and ("chosen" in form.uses or "label" in form.uses):
        log.warning("data: %s: the column system is not read, as in TRL; put it into the prompt", source.name)
    log.info(
        "data: %s: %s read as %s (columns %s%s)",
        source.name,
        counted(records, "record"),
        form.name,
        ", ".join(form.uses),
        f"; not used: {', '.join(unused)}" if unused else "",
    )


class _Drawn:
    """The records of a source that is mixed with others, drawn in order, and again from the first."""

    def __init__(self, source: Source) -> None:
        self._source, self._next = source, 0
        self._records: Iterator[Row] = iter(())

    def __call__(self, number: int) -> Row:
        """Record `number` (from 0), which must be 0 or the one after the last that was asked for. Raises UserError."""
        if number == 0:
            self._records, self._next = (row for row in self._source.rows() if row.record is not None), 0
        assert number == self._next
        self._next += 1
        return next(self._records)


def _mixed(job: Job, tokenizer: PreTrainedTokenizerBase, pairs: bool) -> Iterator[Document]:
    """Yield the documents of all entries, mixed as LLaMA-Factory does it: drawn by `datasets` under the job's seed.
    Drawing ends when the first entry is exhausted (`interleave_under`), or when every entry is. Until then an exhausted
    entry begins again (`interleave_over`), or is drawn no more (`interleave_once`)."""
    broken, yielded = BrokenRows(skip=job.broken_rows == "skip"), 0
    sources, counts = [*map(open_source, job.data)], list[int]()
    for entry, source in zip(job.data, sources, strict=True):
        count, before = 0, broken.met
        for row in source.rows():
            if row.record is None:
                broken.add_row(row)
            count += row.record is not None
        if not count:
            broken.refuse(broken.unread)
            raise no_records(entry.path, left_out=broken.met - before)
        most = entry.most(job.max_samples)
        counts.append(count if most is None else min(count, most))
    forms = [_form(job, source, tokenizer, pairs) for source in sources]
    drawn, empty, records = [0] * len(sources), [0] * len(sources), [*map(_Drawn, sources)]
    for place, number in mixture(job, counts):
        if broken.is_full:
            break
        drawn[place] += 1
        met, entry = broken.met, job.data[place]
        row = records[place](number)
        document = document_of(forms[place], entry, row, broken, again=True)
        if document is None:
            empty[place] += broken.met == met
        elif not broken.ends:
            yielded += 1
            yield replace(document, place=row.place)
    broken.end(yielded, broken.unread + sum(drawn))
    for source, form, count in zip(sources, forms, counts, strict=True):
        _tell(source, form, count)
        form.say_left_out(source.name)
    for source, form, count, every in zip(sources, forms, empty, drawn, strict=True):
        if count := count - form.left_out.total():
            log.warning("data: %s: %d of %d records drawn are empty and left out", source.name, count, every)
    shares = ", ".join(f"{count} of {source.name}" for count, source in zip(drawn, sources, strict=True))
    log.info("data: mixed by %s: %s", job.mix_strategy, shares)


def mixture(job: Job, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (number of the dataset, number of its record), both from 0, for all records that a mixture draws, in order.
    `counts`: the number of records in each dataset."""
    from datasets.arrow_dataset import Dataset
    from datasets.combine import interleave_datasets

    shares = job.interleave_probs
    numbers = [
        Dataset.from_dict({"entry": np.full(count, entry, np.int32), "record": np.arange(count)})
        for entry, count in enumerate(counts)
    ]
    order = interleave_datasets(
        numbers,
        seed=job.seed,
        probabilities=None if shares is None else [share / math.fsum(shares) for share in shares],  # thirds are rounded
        stopping_strategy=_UNTIL[job.mix_strategy],
    )
    for batch in order.iter(_PIECE):
        yield from zip(batch["entry"], batch["record"], strict=True)


def form_of(
    job: Job,
    entry: DataEntry,
    kind: Kind,
    columns: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    *,
    pairs: bool = False,
    source: Source | None = None,
) -> Format:
    """The format by which records of the dataset `entry` become documents. `kind`: what the records are (text,
    conversations, …). `columns`: their columns, under offmate's names. `source`: all of the entry's records; None where
    only some of them are read. Raises UserError for records that no format fits."""
    if job.preference is not None and (kind == "preference" or kind == "unpaired"):
        return preference_format(job, entry, kind, columns, tokenizer)
    if entry.converter is not None:
        if pairs:
            raise v1_rows.refuse_pairs(entry)
        values = {**(job.chat_template_kwargs or {}), **(entry.chat_template_kwargs or {})}
        return v1_rows.format_of(entry, columns, tokenizer, values, source)
    entry = entry_of_pairs(entry, kind) if pairs else entry
    return detect(
        kind,
        columns,
        tokenizer,
        train_on=job.train_on,
        prompt=entry.prompt_format,
        system="system" in entry.columns,
        learned=entry.learned,
        values={**(job.chat_template_kwargs or {}), **(entry.chat_template_kwargs or {})},
        slots=None if pairs else job.chat_template,
        formatting=entry.formatting,
        begin=first_token_of(tokenizer, job) if entry.formatting and job.packing != "wrapped" else None,
        names=entry.columns,
    )


_OF_RECORDS = frozenset(
    {
        "chat-template-refuses",
        "chat-template-too-much",
        "template-drops",
        "assistant-turn-not-found",
        "turns-not-apart",
        "turns-not-marked",
        "turn-not-shown",
    }
)
"""Error codes by which a chat template refuses a single record; any other error concerns the whole job."""


def document_of(
    form: Format, entry: DataEntry, row: Row, broken: BrokenRows, *, again: bool = False
) -> Document | None:
    """The document that `row`, one record of the dataset `entry`, becomes. None for an empty record, and for one in
    error that the job skips, which is added to `broken`. `again`: the row may be drawn again, as in a mixture. Raises
    UserError for an error that concerns more than this record."""
    if row.record is None:
        broken.add_row(row)
        return None
    broken.rendered += 1
    try:
        return form.document(entry.mapped(row.record))
    except (ValueError, UserError) as error:
        if isinstance(error, UserError) and error.code not in _OF_RECORDS:
            numbers = (row.place, *error.numbers)
            raise UserError(
                error.what, code=error.code, exit_code=error.exit_code, hint=error.hint, numbers=numbers
            ) from error
        broken.add(row.place, error, (entry.path, entry.split, row.place) if again else None)
        return None

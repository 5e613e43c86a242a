"""The records of a job's entries, read one after another or mixed, as documents."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from planner.errors import Exit, UserError
from planner.job.broken_rows import BrokenRows, place_of
from planner.job.data_check import kind_in
from planner.job.data_entry import DataEntry
from planner.job.records import Kind, Record
from planner.job.schema import Job
from planner.measure.tokenizer import first_token_of
from worker.data.formats import Document, Format, detect
from worker.data.pairs import entry_of_pairs
from worker.data.sources import Source, open_source

log = logging.getLogger(__name__)

_UNTIL: dict[str, Any] = {
    "interleave_under": "first_exhausted", "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}  # fmt: skip
"""A mixture in the words of `datasets`."""
_PIECE = 2**12  # records of a mixture drawn at a time


def documents_of(job: Job, tokenizer: PreTrainedTokenizerBase, pairs: bool) -> Iterator[Document]:
    """The documents of all entries of the dataset in their order, or mixed as the job says, empty records left out."""
    if job.mix_strategy != "concat" and len(job.data) > 1:
        yield from _mixed(job, tokenizer, pairs)
        return
    broken, given, seen = BrokenRows(skip=job.broken_rows == "skip"), 0, 0
    for entry in job.data:
        before = broken.met
        source, form = _opened(job, entry, tokenizer, pairs, broken)
        seen += broken.met - before  # lines that are no records
        empty, before = 0, broken.met
        for number, record in enumerate(islice(_records(source), entry.most(job.max_samples)), start=1):
            document = document_of(form, entry, record, number, source.name, broken)
            seen += 1
            if document is None:
                empty += 1
            elif not broken.ends:
                given += 1
                yield document
            if broken.is_full:
                break
        broken.refuse(seen)
        form.say_left_out(source.name)
        if empty := empty - (broken.met - before) - form.left_out.total():
            log.warning("data: %s: %d of %d records are empty and left out", source.name, empty, len(source.records))
    broken.end(given, seen)


def _opened(
    job: Job, entry: DataEntry, tokenizer: PreTrainedTokenizerBase, pairs: bool, broken: BrokenRows
) -> tuple[Source, Format]:  # fmt: skip
    source = open_source(entry, broken)
    kind = kind_in(entry, source.columns, source.name)
    columns = entry.names(source.columns)
    form = form_of(job, entry, kind, columns, tokenizer, pairs=pairs)
    used = {entry.columns.get(column, column) for column in form.uses}
    unused = [column for column in source.columns if column not in used]
    log.info(
        "data: %s: %d records read as %s (columns %s%s)", source.name, len(source.records), form.name,
        ", ".join(form.uses), f"; not used: {', '.join(unused)}" if unused else "",
    )  # fmt: skip
    return source, form


def _mixed(job: Job, tokenizer: PreTrainedTokenizerBase, pairs: bool) -> Iterator[Document]:
    """The documents of all entries, drawn from one and another as LLaMA-Factory does: by `datasets`, under the job's
    seed, until the first entry (`interleave_under`) or every one has come to its end; the others then begin again
    (`interleave_over`), or are left out (`interleave_once`)."""
    broken, given = BrokenRows(skip=job.broken_rows == "skip"), 0
    opened = [_opened(job, entry, tokenizer, pairs, broken) for entry in job.data]
    sources, lines = [source for source, _ in opened], broken.met  # lines that are no records
    sizes = [(len(s.records), e.most(job.max_samples)) for e, s in zip(job.data, sources, strict=True)]
    counts = [size if most is None else min(size, most) for size, most in sizes]
    drawn, empty = [0] * len(opened), [0] * len(opened)
    for entry, number in mixture(job, counts):
        source, form = opened[entry]
        drawn[entry] += 1
        with _texts_of(source):
            record = source.records[number]
        before = broken.met
        document = document_of(form, job.data[entry], record, number + 1, source.name, broken, again=True)
        if document is None:
            empty[entry] += broken.met == before
        elif not broken.ends:
            given += 1
            yield document
        if broken.is_full:
            break
    broken.end(given, lines + sum(drawn))
    for (source, form), count, every in zip(opened, empty, drawn, strict=True):
        form.say_left_out(source.name)
        if count := count - form.left_out.total():
            log.warning("data: %s: %d of %d records drawn are empty and left out", source.name, count, every)
    shares = ", ".join(f"{count} of {source.name}" for count, (source, _) in zip(drawn, opened, strict=True))
    log.info("data: mixed by %s: %s", job.mix_strategy, shares)


def mixture(job: Job, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Entry and record, both from 0, of all that is trained on, in order; `counts`: records of each entry."""
    from datasets.arrow_dataset import Dataset
    from datasets.combine import interleave_datasets

    shares = job.interleave_probs
    numbers = [
        Dataset.from_dict({"entry": np.full(count, entry, np.int32), "record": np.arange(count)})
        for entry, count in enumerate(counts)
    ]
    order = interleave_datasets(
        numbers, seed=job.seed,
        probabilities=None if shares is None else [share / math.fsum(shares) for share in shares],  # thirds are rounded
        stopping_strategy=_UNTIL[job.mix_strategy],
    )  # fmt: skip
    for batch in order.iter(_PIECE):
        yield from zip(batch["entry"], batch["record"], strict=True)


def _records(source: Source) -> Iterator[dict[str, object]]:
    """The records one by one."""
    with _texts_of(source):
        yield from source.records


@contextmanager
def _texts_of(source: Source) -> Iterator[None]:
    """Where records are read: only now the texts of JSON and Parquet files show whether they are UTF-8. Raises
    UserError."""
    try:
        yield
    except UnicodeDecodeError as error:
        text = error.object[max(0, error.start - 20) : error.start + 20].decode(errors="replace")
        raise UserError(
            f"Cannot read the dataset {source.name}.", code="dataset-unreadable", exit_code=Exit.USAGE,
            numbers=(f"a text is not UTF-8: 0x{error.object[error.start]:02x} in {text!r}",), hint="save it as UTF-8",
        ) from error  # fmt: skip


def form_of(
    job: Job, entry: DataEntry, kind: Kind, columns: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, *,
    pairs: bool = False,
) -> Format:  # fmt: skip
    """How an entry's records of this kind, with these columns by offmate's names, become documents. Raises
    UserError."""
    entry = entry_of_pairs(entry, kind) if pairs else entry
    return detect(
        kind, columns, tokenizer, train_on=job.train_on, prompt=entry.prompt_format,
        system="system" in entry.columns, learned=entry.learned,
        values={**(job.chat_template_kwargs or {}), **(entry.chat_template_kwargs or {})},
        slots=None if pairs else job.chat_template, formatting=entry.formatting,
        begin=first_token_of(tokenizer, job) if entry.formatting and job.packing != "wrapped" else None,
    )  # fmt: skip


_OF_RECORDS = frozenset({
    "chat-template-refuses", "chat-template-too-much", "template-drops", "assistant-turn-not-found", "turns-not-apart",
    "turns-not-marked", "turn-not-shown",
})  # fmt: skip
"""What a chat template has against a single record; all else is wrong with the job."""


def document_of(
    form: Format, entry: DataEntry, record: Record, place: int | str, name: str, broken: BrokenRows, *,
    again: bool = False,
) -> Document | None:  # fmt: skip
    """The document of a record, which is under the data's own names; None for an empty one, and for one that is now
    among the `broken`. `place`: its number in the data `name`, or in words; `again`: it may come once more. Raises
    UserError for what is wrong with more than the record."""
    try:
        return form.document(entry.mapped(record))
    except (ValueError, UserError) as error:

        def where() -> str:
            return place_of(entry, place, name) if isinstance(place, int) else place

        if isinstance(error, UserError) and error.code not in _OF_RECORDS:
            numbers = (where(), *error.numbers)
            raise UserError(
                error.what, code=error.code, exit_code=error.exit_code, hint=error.hint, numbers=numbers
            ) from error  # fmt: skip
        broken.add(where, error, (entry.path, entry.split, place) if again else None)
        return None

"""A job's first records, rendered, tokenized and masked as the trainer will: `python -m worker.first_records RUN_DIR`.

So it is told at submission what would otherwise end the job when it has its turn: a tokenizer that does not load, a
chat template that fails, a record that it cannot show, a mask under which nothing is learned. Exit codes and errors as
`worker.trainer` has them. What else the submitter is to be told is written into the folder, as an error is.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.broken_rows import BrokenRows
from planner.job.data_check import MOST_BYTES, FirstRows, first_rows, kind_in, learns
from planner.job.data_entry import DataEntry
from planner.job.local_data import is_local, local_data
from planner.job.reader import Reader
from planner.job.schema import Job
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from worker.data.corpus import Corpus
    from worker.data.formats import Document

MOST = 64
"""Records of each entry."""
_MOST_S = 20.0  # where conversations are long
_TOLD = (
    "worker.data.chat", "worker.data.turns", "worker.data.formats", "worker.data.slots", "planner.job.broken_rows",
)  # fmt: skip
"""Who warns of what is told."""


def main(arguments: list[str]) -> int:
    """Look at the job in the folder `arguments[0]`; returns the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m worker.first_records RUN_DIR", file=sys.stderr)
        return Exit.USAGE
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    folder = RunFolder(Path(arguments[0]).absolute())
    return exit_code_of(lambda: _look(folder), folder)


def _look(folder: RunFolder) -> Exit:
    with lasting_imports():
        from planner.measure.hf_model import pairs_of
        from planner.measure.tokenizer import load_tokenizer
        from planner.measure.written import said_of_dtype
        from worker.data.ends import taught_ends
        from worker.training.ends import Ends, ends_of_files

    job = Job.from_resolved(folder.resolved)
    tokenizer, pairs = load_tokenizer(job), pairs_of(job)
    with _warnings() as notes:
        seen = look(job, job.data, tokenizer, pairs=pairs)
        look(job, job.eval_data, tokenizer, pairs=pairs)
    known = () if pairs or seen is None else taught_ends(job, tokenizer, seen)
    ends = Ends(taught=known, before=ends_of_files(job), is_known=seen is not None and not pairs)
    told = (ends.note(job, tokenizer), said_of_dtype(job))
    folder.write_first_notes([*notes, *filter(None, told)])
    return Exit.DONE


class _Warnings(logging.Handler):
    """Keeps what is warned of, each once."""

    def __init__(self, notes: dict[str, None]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes[record.getMessage().removeprefix("data: ")] = None


@contextmanager
def _warnings() -> Iterator[dict[str, None]]:
    """What is said of the chat template and of broken records meanwhile."""
    notes: dict[str, None] = {}
    handler, loggers = _Warnings(notes), [logging.getLogger(name) for name in _TOLD]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    try:
        yield notes
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def look(
    job: Job, entries: tuple[DataEntry, ...], tokenizer: PreTrainedTokenizerBase, *, pairs: bool = False
) -> Corpus | None:  # fmt: skip
    """The first records of `entries`, which are trained on or evaluated on together, as tokens; None where there are
    none. Raises the UserError that they would end the job with. Says nothing of what cannot be read here: parts of
    files, and of splits of the hub."""
    from worker.data.batches import rows_of
    from worker.data.corpus import Corpus, batched, check_tokenizer, encode
    from worker.data.left_out import LeftOut
    from worker.data.pair_rows import layout_of_pairs
    from worker.data.pairs import closing_tokens
    from worker.data.sharing import Sharing

    check_tokenizer(job, tokenizer)
    broken = BrokenRows(skip=job.broken_rows == "skip")
    found = [
        (entry, first) for entry in entries
        if (first := _first(entry, min(MOST, entry.most(job.max_samples) or MOST))) is not None
    ]  # fmt: skip
    left_out, sharing, until = LeftOut(job, pairs=pairs), Sharing(job, pairs=pairs), time.monotonic() + _MOST_S
    documents = [*_documents(job, found, tokenizer, pairs, until, broken)]
    encoded = [
        pair for alike in batched(iter(documents)) for whole in encode(alike, tokenizer, pairs=pairs)
        if not left_out.takes(*(pair := sharing.cut(*whole)))
    ]  # fmt: skip
    whole = len(found) == len(entries) and all(first.whole for _, first in found) and time.monotonic() <= until
    if whole:
        broken.end(len(documents), sum(len(first.rows) for _, first in found))
        left_out.check()
    else:
        broken.say("of the rows read, ")
    if not encoded:
        return None
    corpus = Corpus(
        tokens=np.concatenate([ids for ids, _ in encoded]), trained=np.concatenate([learned for _, learned in encoded]),
        ends=np.cumsum([len(ids) for ids, _ in encoded], dtype=np.int64), fingerprint="",
    )  # fmt: skip
    try:
        layout_of_pairs(corpus, job, closing_tokens(tokenizer)) if pairs else rows_of(corpus, job)
    except UserError as error:
        if error.code != "nothing-to-train" or whole:
            raise
        none = "record has" if len(encoded) == 1 else f"{len(encoded)} records have"
        raise UserError(
            f"The first {none} nothing to learn.", code=error.code, exit_code=Exit.USAGE,
            numbers=error.numbers, hint=f"offmate preview shows what is learned of which row; {error.hint}",
        ) from error  # fmt: skip
    return corpus


def _first(entry: DataEntry, most: int) -> FirstRows | None:
    from worker.data.sources import first_of_hub

    return first_rows(entry, most) if is_local(entry.path) else first_of_hub(entry, most)


def _documents(
    job: Job, found: list[tuple[DataEntry, FirstRows]], tokenizer: PreTrainedTokenizerBase, pairs: bool, until: float,
    broken: BrokenRows,
) -> Iterator[Document]:  # fmt: skip
    """The documents of the rows, as many as are rendered `until` then, of `time.monotonic()`. Raises UserError where
    one is broken, and tells with it those behind that are known to be without a tokenizer."""
    from worker.data.documents import document_of, form_of

    seen = 0
    for entry, first in found:
        if not first.columns:
            continue
        kind = kind_in(entry, first.columns, entry.path)
        form = form_of(job, entry, kind, entry.names(first.columns), tokenizer, pairs=pairs)
        for row in first.rows:
            seen += 1
            if (document := document_of(form, entry, row, broken)) is not None:
                yield document
            if time.monotonic() > until:
                break
        form.say_left_out(f"of the first records of {entry.path}" if not first.whole else entry.path)
        if broken.ends and is_local(entry.path):
            most = entry.most(job.max_samples)
            records = sum(row.record is not None for row in first.rows)
            for row in islice(Reader(local_data(Path(entry.path)), MOST_BYTES), len(first.rows), None):
                if broken.is_full or records == most:
                    break
                learns(entry, kind, row, broken)
                records += row.record is not None
                seen += 1
        broken.refuse(seen)
        if time.monotonic() > until:
            return


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

"""Checks a job that is being submitted, and reports all that is wrong with it.

It checks the job's weights, data and model, and its first records, rendered, tokenized and masked as the trainer will.
So the submitter learns at once, and all together, what would otherwise end the job when it has its turn. This is not
done in the daemon, because files may be made to fill any memory, and this process may take only so much. Notes to the
submitter are written into the run folder, as an error is."""

from __future__ import annotations

import argparse
import logging
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planner.data.broken_rows import BrokenRecordsError, BrokenRows
from planner.data.entry import DataEntry
from planner.data.local_data import is_local, local_data
from planner.data.reader import Reader
from planner.data.records import lacks_of
from planner.errors import Errors, Exit, UserError, is_disk_full
from planner.fast_imports import lasting_imports
from planner.hub import NOT_REACHED, OFFLINE, ask_no_more, is_downloaded, why_not_reached
from planner.job.data_check import MOST_BYTES, FirstRows, check_data, first_rows, is_rendered, kind_in, learns
from planner.job.hub_names import no_such_name, of_hub
from planner.job.length import notes_on_length
from planner.job.schema import Job, says_of_model
from planner.job.weights import check_weights
from planner.run.bounds import OUT_OF_MEMORY, bounded, takes_too_much
from planner.run.folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from worker.data.corpus import Corpus
    from worker.data.formats import Document
    from worker.data.padding import Layout

log = logging.getLogger(__name__)

MOST = 64
"""The number of records of each dataset that are checked."""
_MOST_S = 20.0  # seconds for them, which long conversations may take
_OF_LENGTHS = ("worker.data.batches", "worker.data.preference_rows")
"""The loggers whose warnings count records, here the first ones."""
_TOLD = (
    "worker.data.chat",
    "worker.data.chat_turns",
    "worker.data.formats",
    "worker.data.slots",
    "planner.data.broken_rows",
    "planner.models.peft_lora",
    *_OF_LENGTHS,
    __name__,
)
"""The loggers whose warnings become notes to the submitter."""


def answer(job: Job, options: argparse.Namespace) -> tuple[Exit, str]:
    """Check the submitted job whose run folder is `own_run`, and write notes there. `folder`: where similar names are
    looked for, to suggest them. Returns the exit code and an empty text. Raises UserError with all that is wrong."""
    return _Look(job, options.own_run, options.folder).at_everything(), ""


class _Look:
    """Looks at the job in a run folder, and collects its errors and notes. A check is left out only where it depends on
    something that has an error."""

    def __init__(self, job: Job, folder: RunFolder, beside: Path | None) -> None:
        self._folder, self._beside, self._job = folder, beside, job
        self._wrong, self._notes, self._missing = Errors(), list[str](), set[str]()
        self._looks_at, self._offline, self._failed = "", False, False
        self._unseen: dict[str, list[str]] = {}
        self._longest, self._entries = 0, len((*self._job.data, *self._job.eval_data))

    def at_everything(self) -> Exit:
        """Do all checks, and write the notes. Raises UserError with all that is wrong."""
        job = self._job
        with self._at(f"the weights of {job.model}"):
            check_weights(job)
        self._at_hub()
        needs_tokenizer = self._at_data() and not self._missing
        if needs_tokenizer:
            self._at_records()
        if (needs_tokenizer or says_of_model(job)) and job.model not in self._missing:
            self._at_model()
        self._wrong.refuse()
        if self._failed:
            return Exit.FAILED
        later = "could not be looked at: what is wrong there is told when the job has its turn"
        unseen = [f"{', '.join(dict.fromkeys(whats))} {later}. {why}" for why, whats in self._unseen.items()]
        self._folder.write_first_notes([*self._notes, *unseen])
        return Exit.DONE

    def _say(self, what: str) -> None:
        """Record what is being checked, so that the process that started this one can say so if this one is ended."""
        self._looks_at = what
        self._folder.looks_at.write_text(what, "utf-8")

    @contextmanager
    def _at(self, what: str, bound: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """A context for a check of `what` that must end within a `bound`. A UserError is kept and not raised. Where the
        hub is not reached, a note says so. Any other error but a full disk is printed and makes this process fail at
        its end."""
        self._say(what)
        with self._wrong.apart():
            try:
                with bound or bounded():
                    yield
            except UserError as error:
                if error.code != NOT_REACHED and not (self._offline and error.code == OFFLINE):
                    raise
                self._unseen.setdefault(" ".join((error.what, *error.numbers)), []).append(what)
            except MemoryError:
                raise takes_too_much(self._looks_at, OUT_OF_MEMORY) from None
            except Exception as error:  # our bug, or the machine's; other errors are told all the same
                if is_disk_full(error):
                    raise
                traceback.print_exc()
                self._failed = True

    def _at_hub(self) -> None:
        """If the job names something of the hub, ask once whether the hub answers. If it does not, what this machine
        has is used, and every other name is refused while the person is there: most are paths with a mistake."""
        named = [(key, name, kind) for key, name, kind in of_hub(self._job)]
        if not named or (why := why_not_reached()) is None:
            return
        ask_no_more()
        self._offline = True
        for key, name, kind in named:
            if not is_downloaded(name, kind) and name not in self._missing:
                self._missing.add(name)
                self._wrong.found.append(no_such_name(key, name, kind, self._beside, why))

    def _at_data(self) -> bool:
        """Look at the data as far as no tokenizer is needed. Returns whether to look at records with a tokenizer."""
        before, rendered = len(self._wrong.found), False
        with self._at("the data", bounded(things=self._entries)):
            check_data(self._job, self._say)
        if not all(isinstance(error, BrokenRecordsError) for error in self._wrong.found[before:]):
            return False
        with self._at("the data", bounded(things=self._entries)):
            rendered = is_rendered(self._job)
            self._notes += notes_on_length(self._job)
        return rendered or not all(is_local(entry.path) for entry in (*self._job.data, *self._job.eval_data))

    def _at_records(self) -> None:
        job, before = self._job, list(self._wrong.found)
        with lasting_imports():
            from planner.models.hf_model import pairs_of
            from planner.models.tokenizer import load_tokenizer
            from worker.data.ends import taught_ends
            from worker.training.ends import Ends, ends_of_files

        tokenizer = None
        with self._at(f"the tokenizer {job.tokenizer}"):
            pairs, tokenizer = pairs_of(job), load_tokenizer(job)
        if tokenizer is None:
            return
        paths = ", ".join(entry.path for entry in (*job.data, *job.eval_data))
        with self._at(f"the first records of {paths}", bounded(things=self._entries)):
            with _warnings() as notes:
                seen = look(job, job.data, tokenizer, pairs=pairs)
                look(job, job.eval_data, tokenizer, pairs=pairs)
            self._longest = 0 if pairs or seen is None or _draws(job) else longest_of(seen, job)
            known = () if pairs or seen is None else taught_ends(job, tokenizer, seen)
            ends = Ends(taught=known, before=ends_of_files(job), is_known=seen is not None and not pairs)
            self._notes += [*notes, *filter(None, [ends.note(job, tokenizer)])]
        if any(isinstance(error, BrokenRecordsError) for error in self._wrong.found[len(before) :]):
            # The new error also tells the broken records that were found without a tokenizer.
            told = {id(error) for error in before if isinstance(error, BrokenRecordsError)}
            self._wrong.found[:] = [error for error in self._wrong.found if id(error) not in told]

    def _at_model(self) -> None:
        job = self._job
        with lasting_imports():
            from planner.models.hf_model import skeleton_model
            from planner.models.written import said_of_dtype

        before = len(self._wrong.found)
        # The bound leaves out memory: each weight takes some for a moment, one after another.
        with self._at(f"the model {job.model}", bounded(memory=False)):
            with _warnings() as notes:
                skeleton_model(job)
            self._notes += notes
            self._notes += filter(None, [said_of_dtype(job)])
        if len(self._wrong.found) > before or (job.gpu_budget, job.cpu_budget) == (None, None):
            return
        from planner.commands.plan_job import check_fits
        from planner.measure.target import device_of
        from worker.data.padding import buckets

        if self._wrong.found:  # what follows takes long for a large model: who does not wait for it has these errors
            self._folder.write_error(self._wrong.told())
        # For the rows' own length if that is known, else for the smallest: no row is planned for fewer tokens.
        length = max(self._longest, buckets(job.max_length)[0])
        with self._at(f"the model {job.model}", nullcontext()):
            check_fits(job.with_lengths((length, length)), device_of(None))


def _draws(job: Job) -> bool:
    """Whether a record may be left out by chance, the longest among them."""
    return job.mix_strategy != "concat" or any(entry.draw is not None for entry in job.data)


def longest_of(corpus: Corpus, job: Job) -> int:
    """The number of tokens of the longest document that a row without packing would hold, by the documents of
    `corpus`."""
    return int(_layout(corpus, job).pieces[:, 1].max())


def _layout(corpus: Corpus, job: Job) -> Layout:
    """Which tokens of `corpus` each row holds, without packing. Raises UserError where nothing is learned."""
    from worker.data.batches import rows_of
    from worker.data.preference_rows import preference_layout

    return rows_of(corpus, job) if job.preference is None else preference_layout(corpus, job)


class _Warnings(logging.Handler):
    """A log handler that keeps the text of each warning, once."""

    def __init__(self, notes: dict[str, None]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("data: ")
        self._notes[f"of the first records, {text}" if record.name in _OF_LENGTHS else text] = None


@contextmanager
def _warnings() -> Iterator[dict[str, None]]:
    """Inside, collects the warnings of the loggers in `_TOLD`, as of the chat template and of broken records."""
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
) -> Corpus | None:
    """The first records of `entries`, datasets that are trained on together or evaluated on together, as tokens; None
    where there are none. Raises the UserError with which these records would end the job. Only the beginning of files
    and of hub splits may be read here; the rest is not judged. `pairs`: as prompts and completions for an
    encoder-decoder."""
    from worker.data.corpus import Corpus, batched, check_tokenizer, encode
    from worker.data.left_out import LeftOut
    from worker.data.pair_rows import layout_of_pairs
    from worker.data.pairs import closing_tokens
    from worker.data.sharing import Sharing

    check_tokenizer(job, tokenizer)
    broken = BrokenRows(skip=job.broken_rows == "skip")
    found = [
        (entry, first)
        for entry in entries
        if (first := _first(entry, min(MOST, entry.most(job.max_samples) or MOST))) is not None
    ]
    left_out, sharing, until = LeftOut(job, pairs=pairs), Sharing(job, pairs=pairs), time.monotonic() + _MOST_S
    documents = [*_documents(job, found, tokenizer, pairs, until, broken)]
    encoded = [
        pair
        for alike in batched(iter(documents))
        for whole in encode(alike, tokenizer, pairs=pairs)
        if not left_out.leaves_out(*(pair := sharing.cut(*whole)))
    ]
    whole = len(found) == len(entries) and all(first.whole for _, first in found) and time.monotonic() <= until
    if whole:
        broken.end(len(documents), sum(len(first.rows) for _, first in found))
        left_out.check()
    else:
        broken.say("of the rows read, ")
    if not encoded:
        return None
    corpus = Corpus(
        tokens=np.concatenate([ids for ids, _ in encoded]),
        trained=np.concatenate([learned for _, learned in encoded]),
        ends=np.cumsum([len(ids) for ids, _ in encoded], dtype=np.int64),
        fingerprint="",
    )
    try:
        layout_of_pairs(corpus, job, closing_tokens(tokenizer)) if pairs else _layout(corpus, job)
    except UserError as error:
        if error.code != "nothing-to-train" or whole:
            raise
        none = "record has" if len(encoded) == 1 else f"{len(encoded)} records have"
        raise UserError(
            f"The first {none} nothing to learn.",
            code=error.code,
            exit_code=Exit.USAGE,
            numbers=error.numbers,
            hint=f"offmate preview shows what is learned of which row; {error.hint}",
        ) from error
    return corpus


def _first(entry: DataEntry, most: int) -> FirstRows | None:
    from worker.data.sources import first_of_hub

    return first_rows(entry, most) if is_local(entry.path) else first_of_hub(entry, most)


def _documents(
    job: Job,
    found: list[tuple[DataEntry, FirstRows]],
    tokenizer: PreTrainedTokenizerBase,
    pairs: bool,
    until: float,
    broken: BrokenRows,
) -> Iterator[Document]:
    """The documents of the rows, as many as are rendered by the time `until` (of `time.monotonic()`). Raises UserError
    where a row is broken. It also tells what is wrong with later rows, as far as that shows without a tokenizer."""
    from worker.data.documents import document_of, form_of

    seen = 0
    for entry, first in found:
        if not first.columns:
            continue
        kind = kind_in(entry, first.columns, entry.path, job)
        form = form_of(job, entry, kind, entry.names(first.columns), tokenizer, pairs=pairs)
        of_job, read, empty = Errors(), 0, 0
        for row in first.rows:
            seen += 1
            read += row.record is not None
            document, met = None, broken.met
            with of_job.apart():
                document = document_of(form, entry, row, broken)
            if document is not None:
                yield document
            elif broken.met == met and not of_job.found:
                empty += 1
                if lacks := lacks_of(kind, entry.mapped(row.record or {})):
                    broken.add_lacking(row.place, lacks)
            if of_job.found or time.monotonic() > until:
                break
        form.say_left_out(f"of the first records of {entry.path}" if not first.whole else entry.path)
        if empty := empty - form.left_out.total():
            log.warning("of the first %d records of %s %d are empty and left out", read, entry.path, empty)
        if broken.ends and is_local(entry.path):
            most = entry.most(job.max_samples)
            records = sum(row.record is not None for row in first.rows)
            for row in islice(Reader(local_data(Path(entry.path)), MOST_BYTES), len(first.rows), None):
                if broken.is_full or records == most:
                    break
                learns(entry, kind, row, broken)
                records += row.record is not None
                seen += 1
        with of_job.apart():
            broken.refuse(seen)
        of_job.refuse()
        if time.monotonic() > until:
            return

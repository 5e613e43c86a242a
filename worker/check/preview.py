"""Shows what a job would train on. Reads and tokenizes all of the data, as the trainer will."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
from transformers.utils import logging as transformers_logging

from planner.data.broken_rows import BrokenRecordsError
from planner.errors import Errors, Exit, UserError
from planner.job.at_hand import why_not_at_hand
from planner.job.data_check import check_data
from planner.job.schema import Job
from planner.models.hf_model import pairs_of
from planner.models.rope import rope_border
from planner.models.tokenizer import load_tokenizer
from planner.models.written import said_of_dtype
from planner.units import counted, format_seconds, printable
from worker.data.batches import Batches
from worker.data.shown_row import ShownRow
from worker.training.ends import Ends, ends_of_files

_GREEN, _PLAIN = "\033[32m", "\033[0m"
_SHOWN = 4000  # characters of a row


def answer(job: Job, options: argparse.Namespace) -> tuple[Exit, str]:
    """Describe the data that `job` would train on, in words or as JSON: rows as text with what is learned marked, what
    is cut and left out, how many tokens and steps there are, and, if the database has a plan of the job, how long they
    take. Returns it with exit code 0. Raises UserError."""
    given, wrong = job, Errors()
    with wrong.apart():
        check_data(job)
    if not all(isinstance(error, BrokenRecordsError) for error in wrong.found):  # these are told again below
        wrong.refuse()
    if not job.is_split and job.train_batch_size is not None:
        job = job.with_slices(job.train_batch_size)  # this does not change what a step trains on
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer, pairs = load_tokenizer(job), pairs_of(job)
    warned = _Warnings()
    logging.getLogger().addHandler(warned)
    try:
        batches = Batches(job, tokenizer, pairs=pairs, border=rope_border(job), places=True)
    except BrokenRecordsError:  # it also tells the broken records found above
        raise
    except UserError as error:
        wrong.found.append(error)
    wrong.refuse()
    ends = Ends(taught=() if pairs else batches.ends, before=ends_of_files(job), is_known=not pairs)
    notes = [note for note in (_few_rows(batches, job), ends.note(job, tokenizer), said_of_dtype(job)) if note]
    shown = [batches.shown(place) for place in range(min(options.rows, batches.rows))]
    found = figures(batches, job)
    step_s, told = time_of(given, batches, options.asks, options.database)
    if options.json:
        rows = [asdict(row) | {"pieces": [{"text": t, "learned": it} for t, it in row.pieces]} for row in shown]
        more = {"shown": rows, "step_s": step_s, "time": told, "notes": [*warned.said, *notes]}
        return Exit.DONE, json.dumps(found | more, ensure_ascii=False, indent=2)
    lines = [line for number, row in enumerate(shown, 1) for line in _row_lines(number, row, job, color=options.color)]
    last = (*(f"note: {note}" for note in notes), *_reference(job, batches), told)
    return Exit.DONE, "\n".join([*lines, *_figure_lines(found, job), *map(printable, last)])


class _Warnings(logging.Handler):
    """A log handler that keeps the text of each warning, such as that on what is cut and left out, once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.said[record.getMessage().removeprefix("data: ")] = None


def time_of(job: Job, batches: Batches, asks: str, database: str | None) -> tuple[float | None, str]:
    """(seconds of a step, a text with how long all steps take), by the plan that the database `database` has of the
    job. Without such a plan: None, and a text with the command `asks`, which makes a plan."""
    unknown = f"how long it takes: {asks}"
    if not job.is_split or database is None:  # the plan of a job that is not split decides its micro-batches first
        return None, unknown
    from planner.cache.store import Cache
    from planner.commands.plan_job import kept_plan
    from planner.measure.target import device_of

    logging.disable(logging.INFO)  # messages about the model
    try:
        of_data = batches.counted() if why_not_at_hand(job) is None else None  # as offmate plan asks
        found = kept_plan(job, device_of(None), Cache(database), of_data)
    except UserError as error:  # offmate plan tells all of it
        return None, f"{unknown} ({error.what})"
    finally:
        logging.disable(logging.NOTSET)
    if found is None:
        return None, unknown
    steps, step_s, told = batches.total_steps, found.plan.step_s, "measured" if found.measured else "an estimate"
    each = f"{counted(steps, 'step')} of {format_seconds(step_s)} with full rows"
    return step_s, f"{format_seconds(steps * step_s)}: {each} ({told})"


def figures(batches: Batches, job: Job) -> dict[str, int | float | None]:
    """The data in numbers: `rows`, `tokens` and `learned` tokens of an epoch; the `longest` and the 99th percentile of
    the rows, in tokens; how many documents are `cut` at `max_length`, None where `long_rows` says otherwise."""
    lengths = batches.row_lengths
    return {
        "rows": batches.rows,
        "tokens": batches.tokens,
        "learned": batches.learned,
        "longest": int(lengths.max()),
        "percentile_99": int(np.percentile(lengths, 99, method="higher")),
        "cut": batches.cut,
        "max_length": job.max_length,
        "rows_per_step": batches.rows_per_step,
        "steps_per_epoch": batches.steps_per_epoch,
        "steps": batches.total_steps,
        "tokens_in_all": round(batches.tokens * batches.total_steps / batches.steps_per_epoch),
    }


def _few_rows(batches: Batches, job: Job) -> str | None:
    if batches.rows >= batches.rows_per_step:
        return None
    few = f"a step has {counted(batches.rows_per_step, job.unit)}, and the data have {batches.rows}"
    return f"{few}: each step sees some of them more than once; give more data, or a smaller batch"


def _reference(job: Job, batches: Batches) -> Iterator[str]:
    """A line on the pass before the first step, for a job whose loss compares the model with a reference."""
    if job.refers:
        count = counted(sum(len(rows) for rows in batches.preferences), job.unit)
        model = "the model as it is before training" if job.ref_model is None else job.ref_model
        yield f"before the first step the reference, {model}, scores {count} once, forward only"


def _learned(job: Job) -> str:
    """What becomes of a row's marked tokens, in a word: those of answers to be compared are not all to be learned."""
    return "learned" if job.preference is None else "scored"


def _row_lines(number: int, row: ShownRow, job: Job, *, color: bool) -> Iterator[str]:
    begin, end = (_GREEN, _PLAIN) if color else ("⟦", "⟧")
    place = "".join(f", {printable(place)}" for place in row.places[:1])
    more = f" and {len(row.places) - 1} more" if len(row.places) > 1 else ""
    yield f"{job.unit} {number}{place}{more}: {counted(row.tokens, 'token')}, {row.learned} of them {_learned(job)}"
    pieces = tuple((printable(piece), learned) for piece, learned in row.pieces)
    text = replace(row, pieces=pieces).marked(_SHOWN, begin, end)
    yield text
    if not text.endswith("\n"):
        yield ""


def _figure_lines(found: dict[str, int | float | None], job: Job) -> Iterator[str]:
    tokens, learned, rows, step = (int(found[key] or 0) for key in ("tokens", "learned", "rows", "rows_per_step"))
    longest, all_but_few, in_all = (int(found[key] or 0) for key in ("longest", "percentile_99", "tokens_in_all"))
    an_epoch = f"{counted(rows, job.unit)}, {counted(tokens, 'token')} an epoch"
    yield f"{an_epoch}, {learned} of them {_learned(job)} ({learned / tokens:.0%})"
    cut = "" if found["cut"] is None else f"; {found['cut']} cut at max_length {found['max_length']}"
    a_row = "row" if job.preference is None else "answer with its prompt"
    yield f"the longest {a_row} has {counted(longest, 'token')}, 99% have {all_but_few} at most{cut}"
    yield f"{found['steps_per_epoch']:.1f} steps an epoch of {counted(step, job.unit)}, {found['steps']} in all"
    yield f"{counted(in_all, 'token')} in all, max_length {found['max_length']}"

"""What a job would train on: `python -m worker.preview JOB [--rows N] [--color] [--database URL] [--asks COMMAND]`; JOB
is a resolved job file, COMMAND makes its plan.

Reads and tokenizes all of the data, as the trainer will, and prints rows as text with what is learned marked, what is
cut and left out, how many tokens and steps there are, and how long they take where the database has a plan of the job.
Exit codes are those of `planner.errors`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.at_hand import why_not_at_hand
from planner.job.broken_rows import BrokenRecordsError
from planner.job.data_check import check_data
from planner.job.schema import Job
from planner.measure.rope import rope_border
from planner.run.ending import exit_code_of
from planner.run.plain_streams import speak_plainly
from planner.units import format_seconds, printable

if TYPE_CHECKING:
    from worker.data.batches import Batches

_GREEN, _PLAIN = "\033[32m", "\033[0m"
_SHOWN = 4000  # characters of a row


def main(arguments: list[str]) -> int:
    """Run the command line; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.preview")
    parser.add_argument("job", type=Path)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--color", action="store_true")
    parser.add_argument("--database", metavar="URL", help="where plans are kept")
    parser.add_argument("--asks", metavar="COMMAND", default="offmate plan job.yaml", help="what makes the job's plan")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    return exit_code_of(lambda: _preview(options), None)


def _preview(options: argparse.Namespace) -> Exit:
    given = job = Job.from_resolved(options.job)
    refused = None
    try:
        check_data(job)
    except BrokenRecordsError as error:  # told below, together with what the chat template refuses
        refused = error
    if not job.is_split and job.train_batch_size is not None:
        job = job.with_slices(job.train_batch_size)  # which does not change what a step trains on
    with lasting_imports():
        from transformers.utils import logging as transformers_logging

        from planner.measure.hf_model import pairs_of
        from planner.measure.tokenizer import load_tokenizer
        from planner.measure.written import said_of_dtype
        from worker.data.batches import Batches
        from worker.training.ends import Ends, ends_of_files

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer, pairs = load_tokenizer(job), pairs_of(job)
    batches = Batches(job, tokenizer, pairs=pairs, border=rope_border(job))
    if refused is not None:
        raise refused
    for line in said(batches, job, rows=options.rows, color=options.color):
        print(line)
    ends = Ends(taught=() if pairs else batches.ends, before=ends_of_files(job), is_known=not pairs)
    for note in filter(None, (ends.note(job, tokenizer), said_of_dtype(job))):
        print(f"note: {note}")
    print(time_of(given, batches, options.asks, options.database))
    return Exit.DONE


def time_of(job: Job, batches: Batches, asks: str, database: str | None) -> str:
    """How long all steps take by the plan that is kept of the job, or the command that makes one."""
    unknown = f"how long that takes: {asks}"
    if not job.is_split:
        return f"{unknown}, which decides the rows of a micro-batch; for its plan here give per_device_train_batch_size"
    if database is None:
        return unknown
    from planner.cache.store import Cache
    from planner.commands.plan_job import kept_plan
    from planner.measure.target import device_of

    logging.disable(logging.INFO)  # what the model is like
    try:
        counted = batches.counted() if why_not_at_hand(job) is None else None  # as offmate plan asks
        found = kept_plan(job, device_of(None), Cache(database), counted)
    except UserError as error:  # which offmate plan tells whole
        return f"{unknown} ({error.what})"
    finally:
        logging.disable(logging.NOTSET)
    if found is None:
        return unknown
    steps, step_s, told = batches.total_steps, found.plan.step_s, "measured" if found.measured else "an estimate"
    return f"{format_seconds(steps * step_s)}: {steps} steps of {format_seconds(step_s)} with full rows ({told})"


def said(batches: Batches, job: Job, *, rows: int, color: bool) -> Iterator[str]:
    """The lines of the preview: the first `rows` rows that are trained on, and the figures of all."""
    begin, end = (_GREEN, _PLAIN) if color else ("⟦", "⟧")
    for place in range(min(rows, batches.rows)):
        row = batches.shown(place)
        yield f"row {place + 1}: {row.tokens} tokens, {row.learned} of them learned"
        pieces = tuple((printable(piece), learned) for piece, learned in row.pieces)
        yield replace(row, pieces=pieces).marked(_SHOWN, begin, end)
        yield ""
    tokens, learned = batches.tokens, batches.learned
    yield f"{_counted(batches.rows)}, {tokens} tokens an epoch, {learned} of them learned ({learned / tokens:.0%})"
    step, total = _counted(batches.rows_per_step), batches.total_steps
    yield f"{batches.steps_per_epoch:.1f} steps an epoch of {step}, {total} in all"
    if batches.rows < batches.rows_per_step:
        few = f"a step has {batches.rows_per_step} rows, and there are {batches.rows}"
        yield f"note: {few}: each step sees some of them more than once; give more data, or a smaller batch"
    yield f"{round(tokens * batches.total_steps / batches.steps_per_epoch)} tokens in all, max_length {job.max_length}"


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows} rows"


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

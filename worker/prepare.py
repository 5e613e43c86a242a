"""Tokenizes and counts a job's data before its plan is made: `python -m worker.prepare RUN_DIR`.

The tokens stay in the run folder for the trainer. With `--job FILE` in place of the run folder nothing is kept, and the
counts are printed as one JSON object on one line. Exit codes and errors are those of `worker.trainer`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from planner.counted import Counted
from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.hub import speak_for_a_job
from planner.job.base import keep_base
from planner.job.pins import pin
from planner.job.schema import Job
from planner.run.ending import exit_code_of, leaving_on_signals
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly


def main(arguments: list[str]) -> int:
    """Tokenize and count the data of the job in the run folder `arguments[0]`. Returns the exit code."""
    match arguments:
        case ["--job", file] if Path(file).is_file():
            logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
            with leaving_on_signals():
                return exit_code_of(lambda: _say(Path(file)), None)
        case [path] if Path(path).is_dir():
            logging.basicConfig(
                level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout
            )
            folder = RunFolder(Path(path).absolute())
            speak_for_a_job()
            return exit_code_of(lambda: _prepare(folder), folder)
    print("usage: python -m worker.prepare RUN_DIR, or --job FILE", file=sys.stderr)
    return Exit.USAGE


def _say(file: Path) -> Exit:
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer alone
        counted = _counted(Job.from_resolved(file), None)
    print(json.dumps(asdict(counted)))
    return Exit.DONE


def _prepare(folder: RunFolder) -> Exit:
    job = pin(folder)
    keep_base(job, folder)
    folder.write_counted(_counted(job, folder))
    return Exit.DONE


def _counted(job: Job, folder: RunFolder | None) -> Counted:
    with lasting_imports():
        from planner.models.hf_model import pairs_of
        from planner.models.rope import rope_border
        from planner.models.tokenizer import load_tokenizer
        from worker.data.batches import Batches

    if not job.is_split and job.train_batch_size is not None:
        job = job.with_slices(job.train_batch_size)  # tokens of the whole step are enough for any split
    data, frozen = (None, None) if folder is None else (folder.path / "data", folder.read_frozen())
    return Batches(job, load_tokenizer(job), data, frozen, pairs=pairs_of(job), border=rope_border(job)).counted()


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

"""A job's data, tokenized and counted before its final plan: `python -m worker.prepare RUN_DIR`.

The tokens stay in the run folder for the trainer. Exit codes and errors as `worker.trainer` has them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from planner.errors import Exit
from planner.fast_imports import lasting_imports
from planner.hub import speak_for_a_job
from planner.job.base import check_base
from planner.job.schema import Job
from planner.measure.rope import rope_border
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly


def main(arguments: list[str]) -> int:
    """Prepare the data of the job in the folder `arguments[0]`; returns the exit code."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m worker.prepare RUN_DIR", file=sys.stderr)
        return Exit.USAGE
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    folder = RunFolder(Path(arguments[0]).absolute())
    speak_for_a_job()
    return exit_code_of(lambda: _prepare(folder), folder)


def _prepare(folder: RunFolder) -> Exit:
    with lasting_imports():
        from planner.measure.hf_model import pairs_of
        from planner.measure.tokenizer import load_tokenizer
        from worker.data.batches import Batches

    job = Job.from_resolved(folder.resolved)
    folder.write_base(check_base(job, folder.read_base(), folder.path.parent))
    if not job.is_split and job.train_batch_size is not None:
        job = job.with_slices(job.train_batch_size)  # tokens of the whole step are enough for any split
    batches = Batches(
        job, load_tokenizer(job), folder.path / "data", folder.read_frozen(), pairs=pairs_of(job),
        border=rope_border(job),
    )  # fmt: skip
    folder.write_distinct_tokens(batches.distinct_tokens())
    return Exit.DONE


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

"""Notes for the user on runs that are shorter than the job file suggests. Does not import torch."""

from __future__ import annotations

import math

from planner.job.data_check import count_of_few
from planner.job.notes import all_warmup
from planner.job.schema import Job
from planner.units import counted

_MOST_BYTES = 2**20  # read of each entry: few records are few bytes
_MOST = 1000


def notes_on_length(job: Job) -> tuple[str, ...]:
    """Return notes on the length of a checked job's run, if it has so few data that counting its records is quick."""
    if job.packing == "wrapped" or job.long_rows == "split" or job.mix_strategy == "interleave_over":
        return ()  # a record may be several rows
    records = 0
    for entry in job.data:
        if (count := count_of_few(entry, _MOST, _MOST_BYTES)) is None:
            return ()
        records += min(count, entry.most(job.max_samples) or _MOST)
    step = job.train_batch_size or job.slice_rows * job.gradient_accumulation_steps
    notes: list[str | None] = []
    if records < step:
        few = f"a step has {counted(step, 'row')}, and the data {counted(records, 'record')}"
        notes.append(f"{few}: each step sees some of them more than once; give more data, or a smaller batch.")
    if job.max_steps is None:
        most = max(1, math.ceil(round(job.num_train_epochs * records / step, 6)))
        notes.append(all_warmup(job.lr_scheduler_type, job.warmup_steps, most))
    return tuple(filter(None, notes))

"""Taking a job in: all of it, or nothing."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from offmated.models import JobRow
from offmated.paths import Paths
from offmated.store import Store
from planner.job import Job
from planner.runfolder import RunFolder

NAME_LENGTH = 255


def submit(store: Store, paths: Paths, yaml_text: str, folder: Path) -> tuple[JobRow, tuple[str, ...]]:
    """Check the job, make its run folder and its row; returns the row and the notes to the user.

    Raises UserError for a job that cannot be run as written; then nothing was kept.
    """
    job = Job.parse(yaml_text, folder)
    name = (job.run_name or Path(job.model).name)[:NAME_LENGTH]
    draft = paths.runs / f".new-{uuid.uuid4().hex}"

    def make_folder(job_id: int) -> Path:
        final = paths.run_folder(job_id)
        if final.exists():  # of a submission that did not get as far as its row: the number is free
            shutil.rmtree(final)
        draft.rename(final)
        _flush(paths.runs)
        return final

    try:
        draft.mkdir(mode=0o700)
        run = RunFolder(draft)
        _write(run.submitted, yaml_text)
        _write(run.resolved, job.resolved_yaml())
        _flush(draft)
        return store.add(name, make_folder), job.notes
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # still there only when something went wrong


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

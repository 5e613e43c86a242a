"""Frees disk space from jobs that are over: removes their checkpoints, optimizer states on other disks, tokenized data
and the reference's scores of them, and keeps everything that people look at."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select, update

from offmated.jobs.retry import alone
from offmated.jobs.states import FINAL, JobState
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from planner.errors import Exit, UserError
from planner.keys.source import read_text, read_yaml
from planner.run.folder import RunFolder

_GONE = ".gone-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """A job, and how many bytes of files that are not needed any more its folder holds, or held before they were
    removed."""

    id: int
    name: str
    state: JobState
    bytes: int


def clean(
    store: Store, job_ids: Sequence[int] = (), *, unfinished: bool = False, older_s: float = 0.0, remove: bool
) -> tuple[Freed, ...]:
    """Remove checkpoints and tokenized data of jobs that are done; with `unfinished`, also of jobs that failed or were
    cancelled. When tried again, such a job begins from its start; a job that went on from another job's checkpoint has
    no start of its own, and is refused. With `job_ids` only these jobs are cleaned, else all that have been over for
    `older_s` seconds. Without `remove` nothing is removed. Returns the jobs with the bytes that are, or would be,
    freed.

    Models, logs, numbers, plans and job files stay. Raises UserError `no-such-job`, `job-not-over`,
    `job-unfinished`."""
    freed = []
    for row in _rows(store, job_ids, unfinished, older_s):
        with alone(row.id):  # a retry looks for the checkpoint that goes here
            if store.job(row.id).state is not row.state:
                continue
            folders = [folder for folder in _folders(RunFolder(Path(row.run_dir))) if folder.is_dir()]
            states = _states(RunFolder(Path(row.run_dir)))
            size = sum(_size(path) for path in (*folders, *states))
            if remove:
                _remove(store, row, folders)
                for file in states:  # after the checkpoints that need them
                    file.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # something else is there, too
                        file.parent.rmdir()
        if folders or states:
            freed.append(Freed(id=row.id, name=row.name, state=row.state, bytes=size))
    return tuple(freed)


def _rows(store: Store, job_ids: Sequence[int], unfinished: bool, older_s: float) -> Sequence[JobRow]:
    if job_ids:
        rows = [store.job(number) for number in dict.fromkeys(job_ids)]
        for row in rows:
            if row.state not in FINAL:
                raise UserError(
                    f"Job {row.id} is not over: it is {row.state}.",
                    code="job-not-over",
                    exit_code=Exit.USAGE,
                    hint=f"offmate cancel {row.id}",
                )
            if row.state is not JobState.DONE and not unfinished:
                raise UserError(
                    f"Job {row.id} is {row.state}: without its checkpoints it cannot go on from them.",
                    code="job-unfinished",
                    hint="offmate clean --unfinished removes them all the same",
                    exit_code=Exit.USAGE,
                )
        return rows
    states = tuple(FINAL) if unfinished else (JobState.DONE,)
    over = select(JobRow).where(JobRow.state.in_(states), JobRow.ended_at <= time.time() - older_s).order_by(JobRow.id)
    with store.looking() as session:
        return session.scalars(over).all()


def _folders(run: RunFolder) -> tuple[Path, ...]:
    """The folders that are not needed any more, and those left by a removal that was cut short."""
    return run.checkpoints, run.trained, run.best, run.path / "data", run.reference, *run.path.glob(f"{_GONE}*")


def _states(run: RunFolder) -> list[Path]:
    """Files of optimizer states in the folders that the job names for them, and files of activations, which are left
    only by a process that is killed while it makes one."""
    try:
        values = read_yaml(read_text(run.resolved, longest=None), run.resolved.name, longest=None).values
    except (OSError, ValueError, UserError):
        return []
    disks = values.get("disk_paths") or []
    return [file for disk in disks if isinstance(disk, str) for file in run.states_on(disk).glob("*.bin")]


def _remove(store: Store, row: JobRow, folders: Sequence[Path]) -> None:
    """Remove the folders. Each is renamed first, so that nobody takes half of a checkpoint for a whole one."""
    for folder in folders:
        if folder.is_symlink():  # its target is somebody else's
            folder.unlink()
            continue
        aside = folder.with_name(f"{_GONE}{uuid.uuid4().hex}")
        folder.rename(aside)
        shutil.rmtree(aside)
    if row.state is not JobState.DONE:
        with store.writing() as session:
            session.execute(update(JobRow).where(JobRow.id == row.id).values(last_checkpoint_step=None))


def _size(folder: Path) -> int:
    if folder.is_symlink():
        return 0
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())

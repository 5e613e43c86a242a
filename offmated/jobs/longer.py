"""Continues a job that is done for more epochs or steps, as a new job: the conditions, the new job, and the notes on
it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from offmated.jobs.states import JobState
from offmated.jobs.table import JobRow
from planner.errors import Exit, UserError
from planner.job.base import check_base
from planner.job.frozen import check_frozen
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.units import counted

_LEVEL = ("constant", "constant_with_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The total length that a job shall have: exactly one of `epochs` and `max_steps`."""

    epochs: float | None = None
    max_steps: int | None = None

    def __str__(self) -> str:
        return counted(self.epochs, "epoch") if self.epochs is not None else counted(self.max_steps or 0, "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Longer:
    """A new job that continues from `checkpoint`, and notes on what its numbers can be compared with."""

    job: Job
    checkpoint: Path
    notes: tuple[str, ...]


def longer(row: JobRow, length: Length) -> Longer:
    """Make the job that continues the done job of `row`, from its newest checkpoint, to another total length. Raises
    UserError where there is no checkpoint, where its data or its base have changed, or where the longer run would not
    continue the first one."""
    run = RunFolder(Path(row.run_dir))
    if row.state is not JobState.DONE:
        raise _no(row, f"it is {row.state}", f"offmate retry {row.id} goes on with one that failed or was cancelled")
    job = Job.from_resolved(run.resolved)
    new = _with_length(row, job, length)
    if job.load_best_model_at_end:
        raise _no(row, "it took its best evaluation, and what came behind that is gone", "")
    if job.early_stopping_patience is not None:
        raise _no(row, "early_stopping_patience counts from the first run's evaluations, which a new one has not", "")
    if job.disk_paths is not None:
        raise _no(row, "its optimizer states were on disk, and went with its end", "")
    checkpoints = [folder for folder in run.checkpoints.glob("step-*") if folder.name[5:].isdigit()]
    if not checkpoints:
        raise _no(
            row,
            "it has no checkpoint any more, or never had one: nothing is saved after the last step",
            f"offmate rerun {row.id} begins from the start; a smaller save_steps leaves a checkpoint near the end",
        )
    hint = f"offmate rerun {row.id} trains from the start on what is there now"
    check_frozen(job, run.read_frozen(), hint=hint)
    check_base(job, run.read_base(), run.path.parent, hint=hint)
    checkpoint = max(checkpoints, key=lambda folder: int(folder.name[5:]))
    notes = [_note(row, new, length, int(checkpoint.name[5:]))]
    if job.eval_steps is not None and job.eval_steps < 1:
        notes.append(f"eval_steps, {job.eval_steps:g}, is a share of {length} now: evaluations are further apart")
    return Longer(job=new, checkpoint=checkpoint, notes=tuple(notes))


def link(checkpoint: Path, run: RunFolder) -> None:
    """Put `checkpoint`, and what it needs of its run, into the folder of `run`, as hard links: nobody writes to these
    files, so the links take no space and stay when the first job's files are removed. Raises UserError `cannot-go-on`
    where files cannot be linked."""
    into = run.checkpoints / checkpoint.name
    before = RunFolder(checkpoint.parents[1])
    try:
        into.mkdir(parents=True, mode=0o700)
        for file in checkpoint.iterdir():
            os.link(file, into / file.name)
        if before.begun.exists():
            os.link(before.begun, run.begun)
        if before.reference.is_dir():  # only the weights of the start could give these scores again
            run.reference.mkdir(mode=0o700)
            for file in before.reference.glob("*.npy"):
                os.link(file, run.reference / file.name)
    except OSError as error:  # another file system behind a symbolic link, or one without hard links
        raise UserError(
            "The job cannot go on for longer: its checkpoint cannot be hard-linked into the new run.",
            numbers=(f"{checkpoint}: {error.strerror}",),
            code="cannot-go-on",
            exit_code=Exit.USAGE,
            hint="checkpoints and the daemon's runs must be on one file system",
        ) from None


def went_on_from(run: RunFolder) -> str | None:
    """The number of the job from whose checkpoint this run started; None for a run that trained from the beginning."""
    try:
        return Path(run.goes_on.read_text("utf-8").strip()).parents[1].name or None
    except (OSError, UnicodeDecodeError, IndexError):
        return None


def _with_length(row: JobRow, job: Job, length: Length) -> Job:
    if length.max_steps is not None:
        if job.max_steps is not None and length.max_steps <= job.max_steps:
            raise _no(row, f"it has had {counted(job.max_steps, 'step')}", "--max-steps is their number in all")
        if job.max_steps is None:
            raise _no(row, f"its length is {counted(job.num_train_epochs, 'epoch')}", "say --epochs")
        return job.model_copy(update={"max_steps": length.max_steps, "output_dir": None})
    assert length.epochs is not None
    if job.max_steps is not None:
        raise _no(row, f"its length is max_steps, {job.max_steps}", "say --max-steps")
    if length.epochs <= job.num_train_epochs:
        raise _no(row, f"it has had {counted(job.num_train_epochs, 'epoch')}", "--epochs is their number in all")
    return job.model_copy(update={"num_train_epochs": length.epochs, "output_dir": None})


def _note(row: JobRow, job: Job, length: Length, step: int) -> str:
    begins = f"it goes on from step {step} of job {row.id}, the newest checkpoint kept"
    if job.lr_scheduler_type in _LEVEL and not 0 < job.warmup_steps < 1:
        return f"{begins}: under the same plan its numbers are those of {length} from the start, in every bit"
    return (
        f"{begins}; from there the learning rate is that of {length}, while until there it was that of the shorter run "
        f"({job.lr_scheduler_type}): its numbers are of neither. Only constant rates go on without a seam"
    )


def _no(row: JobRow, why: str, hint: str) -> UserError:
    return UserError(
        f"Job {row.id} cannot go on for longer: {why}.", hint=hint, code="cannot-go-on", exit_code=Exit.USAGE
    )

"""Defines the bodies of requests, with the bounds of their values."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from offmated.jobs.longer import Length
from offmated.jobs.queue_turns import Turn
from offmated.jobs.states import LARGEST_ID, MOST_PRIORITY
from offmated.jobs.table import KEY_LENGTH, WINDOW_LENGTH
from planner.errors import Exit, UserError
from planner.units import printable

MOST_JOBS = 200
MOST_SETTINGS = 100


class Body(BaseModel):
    """Base class of request bodies. A body with an unknown field is refused: a newer client may have sent it, and means
    something by it."""

    model_config = ConfigDict(extra="forbid")


class AskedTurn(Body):
    """The conditions under which a new job may start: its time, priority and place in the queue."""

    priority: Annotated[
        int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="Jobs of higher priority run first.")
    ] = 0
    after: Annotated[int | None, Field(ge=1, le=LARGEST_ID, description="The job runs only when this job is done.")] = (
        None
    )
    begin_at: Annotated[
        float | None, Field(ge=0, le=2**40, description="The earliest start, in seconds since 1970.")
    ] = None
    label: Annotated[
        str | None, Field(min_length=1, max_length=KEY_LENGTH, description="A word to find the job by.")
    ] = None
    held: Annotated[bool, Field(description="The job is held until it is released.")] = False
    window: Annotated[
        str | None,
        Field(min_length=1, max_length=WINDOW_LENGTH, description="The hours in which the job may run."),
    ] = None

    def turn(self) -> Turn:
        """These conditions as the `Turn` that the queue uses."""
        return Turn(
            priority=self.priority,
            after=self.after,
            begin_at=self.begin_at,
            held=self.held,
            window=self.window,
            label=printable(self.label) if self.label is not None else None,
        )


class Submission(AskedTurn):
    """A job that is submitted, with its file's text in `yaml`. Relative paths in it are below `folder`, an absolute
    path that may begin with `~`; errors call the file `name`. `settings`, each "KEY=VALUE", override the file."""

    yaml: Annotated[str, Field(description="The text of the job file.")]
    folder: Annotated[str, Field(description="The folder to which relative paths in the file belong.")]
    name: Annotated[str, Field(description="The name of the file in errors.")] = "job.yaml"
    settings: Annotated[
        list[str], Field(max_length=MOST_SETTINGS, description='Overrides of the file, each "KEY=VALUE".')
    ] = []

    def base(self) -> Path:
        """`folder` as an absolute path. Raises UserError `relative-folder`: the daemon's own folder means nothing to
        whoever submits."""
        path = Path(self.folder)
        with suppress(RuntimeError):  # nobody has that home
            path = path.expanduser()
        if not path.is_absolute():
            raise UserError(
                f"The folder of {self.name} is not an absolute path.",
                numbers=(f'it is "{self.folder}"', "relative paths in the file start there"),
                code="relative-folder",
                exit_code=Exit.USAGE,
                hint="give it from the root, as in /data/jobs, or from your home folder, as in ~/jobs",
            )
        return path


class AskedLonger(AskedTurn):
    """How far a done job is to go on from its newest checkpoint: the total number of epochs or of steps, exactly one of
    the two."""

    epochs: Annotated[
        float | None, Field(gt=0, le=10**6, allow_inf_nan=False, description="Epochs in all, with those already done.")
    ] = None
    max_steps: Annotated[int | None, Field(ge=1, le=10**9, description="Steps in all, with those already done.")] = None

    @model_validator(mode="after")
    def _one_length(self) -> AskedLonger:
        if (self.epochs is None) == (self.max_steps is None):
            raise ValueError("say one of epochs and max_steps")
        return self

    def length(self) -> Length:
        """The total length that the job shall have, as a `Length`."""
        return Length(epochs=self.epochs, max_steps=self.max_steps)


class Move(Body):
    """The place in the queue to which a job is moved, by exactly one of the three fields."""

    to: Annotated[Literal["first", "last"] | None, Field(description="Before, or after, all waiting jobs.")] = None
    before: Annotated[int | None, Field(ge=1, le=LARGEST_ID, description="Before this job, with its priority.")] = None
    priority: Annotated[
        int | None, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY, description="The job's new priority.")
    ] = None

    @model_validator(mode="after")
    def _one(self) -> Move:
        if sum(value is not None for value in (self.to, self.before, self.priority)) != 1:
            raise ValueError("say one of to, before and priority")
        return self


class Again(Body):
    """The changes with which a job is tried again: the budgets in bytes (null: as before), and whether its data or its
    base may have changed since it was submitted."""

    gpu_budget: Annotated[int | None, Field(ge=1, lt=2**63, description="GPU memory in bytes.")] = None
    cpu_budget: Annotated[int | None, Field(ge=1, lt=2**63, description="Host memory in bytes.")] = None
    allow_changed_data: Annotated[bool, Field(description="Train on the data files as they are now.")] = False
    allow_changed_model: Annotated[bool, Field(description="Use the model and the tokenizer as they are now.")] = False


class Cleaning(Body):
    """The jobs whose checkpoints and data are to be removed."""

    jobs: Annotated[
        list[Annotated[int, Field(ge=1, le=LARGEST_ID)]],
        Field(max_length=MOST_JOBS, description="Only these jobs; none given: all that have been over long enough."),
    ] = []
    unfinished: Annotated[bool, Field(description="Also jobs that failed or were cancelled.")] = False
    older_s: Annotated[float, Field(ge=0, le=2**40, description="For how many seconds a job must have been over.")] = (
        0.0
    )
    remove: Annotated[bool, Field(description="Remove the files; otherwise they are only counted.")] = False


class Adoption(Body):
    """The run folders of which jobs are to be made again."""

    folders: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=4096)]],
        Field(max_length=MOST_JOBS, description="Names of run folders; none given: all that no job has."),
    ] = []

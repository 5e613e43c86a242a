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

    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    after: Annotated[int, Field(ge=1, le=LARGEST_ID)] | None = None
    begin_at: Annotated[float, Field(ge=0, le=2**40)] | None = None
    label: Annotated[str, Field(min_length=1, max_length=KEY_LENGTH)] | None = None
    held: bool = False
    window: Annotated[str, Field(min_length=1, max_length=WINDOW_LENGTH)] | None = None

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

    yaml: str
    folder: str
    name: str = "job.yaml"
    settings: Annotated[list[str], Field(max_length=MOST_SETTINGS)] = []

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

    epochs: Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)] | None = None
    max_steps: Annotated[int, Field(ge=1, le=10**9)] | None = None

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

    to: Literal["first", "last"] | None = None
    before: Annotated[int, Field(ge=1, le=LARGEST_ID)] | None = None
    priority: Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Move:
        if sum(value is not None for value in (self.to, self.before, self.priority)) != 1:
            raise ValueError("say one of to, before and priority")
        return self


class Again(Body):
    """The changes with which a job is tried again: the budgets in bytes (null: as before), and whether its data or its
    base may have changed since it was submitted."""

    gpu_budget: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    cpu_budget: Annotated[int, Field(ge=1, lt=2**63)] | None = None
    allow_changed_data: bool = False
    allow_changed_model: bool = False


class Cleaning(Body):
    """The jobs whose checkpoints and data are to be removed; see `offmated.jobs.clean`."""

    jobs: Annotated[list[Annotated[int, Field(ge=1, le=LARGEST_ID)]], Field(max_length=MOST_JOBS)] = []
    unfinished: bool = False
    older_s: Annotated[float, Field(ge=0, le=2**40)] = 0.0
    remove: bool = False


class Adoption(Body):
    """Names of run folders that are to be jobs again; see `offmated.jobs.adopt`."""

    folders: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=MOST_JOBS)] = []

"""The keys of a job for what it writes, where it reports, and when it may run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planner.keys.base import Keys
from planner.keys.fields import Count, Minutes, Name, ReportTo, Text


class OutputKeys(Keys):
    """These keys say when checkpoints are saved, and where and how the trained model is written."""

    save_steps: Count = 500
    """The number of steps from one checkpoint to the next. A killed job repeats the steps since its last checkpoint."""
    save_minutes: Minutes = 15.0
    """A checkpoint is also saved when this many minutes have passed since the last one. The interval grows if saving
    would take more than a twentieth of the time."""
    save_total_limit: Annotated[
        Count | None, Field(description="a whole number from 1 to 10^9, or null to keep all")
    ] = 2
    """The number of checkpoints that are kept. The oldest is deleted when the newest is on disk, so for a moment there
    is one more. A checkpoint takes 12 bytes for each trained parameter, with `adamw_8bit` half and with `muon` two
    thirds of that. With `disk_paths` the default is 1, because a checkpoint then only names states that are on the
    drive and copies nothing."""
    output_dir: Annotated[Text | None, Field(description="a path, or null for the run folder")] = None
    """The folder for the trained model. null: `output/` in the run folder. The folder must be empty or not exist, and
    must not be that of another waiting or running job, nor lie in offmate's state folder. It is tried at submission and
    again when the job's turn comes, and gets the model when that is complete."""
    save_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"] | None,
        Field(description="bfloat16, float16, float32, or null for the base's"),
    ] = None
    """The dtype in which the model is written, rounded once from the fp32 master weights. null: the dtype of the
    published base. If float16 has no room for a number, the model is written in bfloat16, with a message; adapters are
    always written in fp32. Other tools' keys for the dtype of trained weights (`dtype`, `torch_dtype`, `pure_bf16`,
    `bfloat16`, `float32`, `bf16: full`) set this key, too."""


class ReportKeys(Keys):
    """These keys name the run and the trackers that get its metrics."""

    run_name: Name = None
    """The name in lists and trackers. null: the job file's name, `qwen-notes` for `qwen-notes.yaml`; for `job.yaml` or
    `config.yaml` the name of its folder."""
    report_to: ReportTo = ()
    """The trackers that get the run's metrics ([more](../how-to/queue-a-night.md#trackers)). As in axolotl, a project
    or experiment in the file also turns its tracker on. A tracker that fails or is not installed harms no job."""
    wandb_project: Name = None
    """The project in wandb. null: `offmate`."""
    wandb_entity: Name = None
    """The user or team in wandb. null: your own."""
    wandb_mode: Annotated[
        Literal["online", "offline", "disabled"] | None, Field(description="online, offline or disabled")
    ] = None
    """`offline`: wandb writes to the run folder, for `wandb sync`. `disabled`: nothing is reported."""
    trackio_project_name: Name = None
    """The project in trackio. null: `offmate`."""
    trackio_space_id: Name = None
    """A Space on the Hugging Face hub to which trackio writes, too."""
    mlflow_experiment_name: Name = None
    """The experiment in mlflow. null: `offmate`."""
    mlflow_tracking_uri: Name = None
    """mlflow's server or store. null: `MLFLOW_TRACKING_URI` in the daemon's environment, else `mlflow.db` in the state
    folder. An address with a user, a password or a key is refused (`secret-in-job`). Addresses are not reported to
    trackers."""


class ScheduleKeys(Keys):
    """This key says when the job may use the GPU ([a queue for a night](../how-to/queue-a-night.md))."""

    schedule: Annotated[Text | None, Field(description="a window of hours like 23:00-07:00, or null")] = None
    """The hours in which the job may use the GPU, with days and a time zone where they matter: `23:00-07:00 mon-fri
    Europe/Berlin`. A mapping of `window`, `days` and `timezone` means the same. null: at any time, or in the machine's
    own window."""

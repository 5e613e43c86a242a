"""The room that a job takes on its disks, and a check that it is there. Light: no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from planner.disk import check_space
from planner.job.output_dir import Place
from planner.job.schema import Job

STATE_BYTES_PER_PARAMETER = 12
"""The most bytes that a checkpoint has for a trained parameter: master and moments, fp32."""
FILES_BYTES = 2**24
"""About the bytes of a model folder beside its weights: configs, tokenizer, headers."""


def checkpoint_bytes(job: Job, saved: int, on_disk: int = 0) -> int:
    """The bytes of a checkpoint with `saved` bytes of masters and moments (`Chain.saved_bytes`). `on_disk`: those of
    them that are on disk; a checkpoint that is no copy only names these."""
    return saved - (on_disk if job.state_homes > 1 else 0) + 2**20


def check_room(run_folder: Path, place: Place, *, checkpoint_bytes: int, weight_bytes: int, best: bool = False) -> int:
    """Try the place where the model will go, and check that there is room for a checkpoint, the trained weights and the
    model folder; with `best`, also for the weights of the best evaluation and of the next best one beside them. Returns
    the bytes that checkpoints may take on the run folder's disk. Raises UserError."""
    model_bytes = weight_bytes + FILES_BYTES
    place.try_out(model_bytes)
    taken = (3 if best else 1) * weight_bytes + (model_bytes if _disk_of(place.folder) == _disk_of(run_folder) else 0)
    check_space(run_folder, checkpoint_bytes + taken, "a checkpoint and the trained model")
    return shutil.disk_usage(run_folder).free - taken


def _disk_of(folder: Path) -> int:
    """The number of the disk that a folder is on, or will be."""
    return next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev

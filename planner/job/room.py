"""What a job takes on its disks, and whether they have that. Light: no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from planner.disk import check_space
from planner.job.output_dir import Place
from planner.job.schema import Job

STATE_BYTES_PER_PARAMETER = 12
"""What a checkpoint has of a trained parameter at most: master and moments, fp32."""
FILES_BYTES = 2**24
"""About what is beside the weights in a model folder: configs, tokenizer, headers."""


def checkpoint_bytes(job: Job, saved: int, on_disk: int = 0) -> int:
    """What a checkpoint takes with so many bytes of masters and moments (`Chain.saved_bytes`). `on_disk`: bytes of them
    that are on disk, which it only names where it is no copy."""
    return saved - (on_disk if job.state_homes > 1 else 0) + 2**20


def check_room(run_folder: Path, place: Place, *, checkpoint_bytes: int, weight_bytes: int, best: bool = False) -> int:
    """Try the place where the model will go, and see that there is room for a checkpoint, the trained weights and the
    model folder with them; with `best`, for the weights of the best evaluation, too, and of the next best one beside
    them. Returns the bytes that checkpoints may take of the run folder's disk. Raises UserError."""
    model_bytes = weight_bytes + FILES_BYTES
    place.try_out(model_bytes)
    taken = (3 if best else 1) * weight_bytes + (model_bytes if _disk_of(place.folder) == _disk_of(run_folder) else 0)
    check_space(run_folder, checkpoint_bytes + taken, "a checkpoint and the trained model")
    return shutil.disk_usage(run_folder).free - taken


def _disk_of(folder: Path) -> int:
    """The number of the disk that a folder is on, or will be."""
    return next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev

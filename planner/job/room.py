"""Computes the disk space that a job needs or allows, and checks that there is enough. Does not import torch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from planner.disk import check_space
from planner.job.output_dir import Place
from planner.job.schema import Job
from planner.machine.hardware import Hardware

STATE_BYTES_PER_PARAMETER = 12
"""The most bytes of a checkpoint per trained parameter: an fp32 master weight and two fp32 moments."""
FILES_BYTES = 2**24
"""About the bytes of a model folder besides its weights: configs, tokenizer, headers."""
_ANY = 2**62


def checkpoint_bytes(job: Job, saved: int, on_disk: int = 0) -> int:
    """Return the size of a checkpoint in bytes. `saved`: bytes of the master weights and moments (`Chain.saved_bytes`);
    `on_disk`: how many of these are on disk during training. Where the job keeps two copies of these
    (`Job.state_homes`), a checkpoint only names one and copies nothing."""
    return saved - (on_disk if job.state_homes > 1 else 0) + 2**20


def check_room(run_folder: Path, place: Place, *, checkpoint_bytes: int, weight_bytes: int, best: bool = False) -> int:
    """Check that the output folder can be written, and that the disks have room for a checkpoint, the trained weights
    and the model folder. Returns the bytes that checkpoints may take on the run folder's disk. `best`: also count the
    weights of the best evaluation, and of the next best one beside them. Raises UserError."""
    model_bytes = weight_bytes + FILES_BYTES
    place.try_out(model_bytes)
    taken = (3 if best else 1) * weight_bytes + (model_bytes if _disk_of(place.folder) == _disk_of(run_folder) else 0)
    check_space(run_folder, checkpoint_bytes + taken, "a checkpoint and the trained model")
    return shutil.disk_usage(run_folder).free - taken


def with_drive(job: Job, hardware: Hardware) -> Hardware:
    """Return `hardware` with the disk space that the job allows for optimizer states, divided by the number of times
    that each state is stored."""
    room = (job.disk_budget or _ANY) // job.state_homes
    return at_most(room, hardware) if job.disk_paths else hardware


def at_most(room: int, hardware: Hardware) -> Hardware:
    """Return `hardware` with at most `room` bytes of disk space for optimizer states, and at least one byte."""
    return replace(hardware, disk_bytes=max(1, min(room, hardware.disk_bytes or _ANY)))


def _disk_of(folder: Path) -> int:
    """Return the device number of the disk that a folder is on, or will be on."""
    return next(path for path in (folder, *folder.parents) if path.exists()).stat().st_dev

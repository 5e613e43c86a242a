"""Keeps the trained weights between the last step and the model folder, and reserves the disk space for them.

They are first written in the run folder, so that nothing must be trained again if the model folder fails: it may be on
another disk, where anything may have happened. They are removed once the model folder is in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from planner.disk import sync
from planner.errors import disk_full
from worker.storage.checkpoint import Checkpoint, Origin, TornCheckpoint, read_checkpoint, write_checkpoint
from worker.storage.shards import Written


class TrainedWeights:
    """The trained weights of one run, kept in `folder` from the last step until the model folder is complete."""

    def __init__(self, folder: Path, *, origin: Origin) -> None:
        self._folder = folder
        self._origin = origin

    def find(self) -> Checkpoint | None:
        """Find the newest trained weights that are for this job, its data and its length, and whose every byte is
        right; None if there are none. Older ones may remain where a process was killed while it removed them."""
        for step in sorted(self._steps(), reverse=True):
            try:
                weights = read_checkpoint(self._folder / f"step-{step}")
            except TornCheckpoint:
                continue
            if not weights.origin.differences(self._origin):
                return weights
        return None

    def write(self, weights: Iterable[Written], *, step: int) -> Checkpoint:
        """Write the `weights`, one part "weight" for each tensor, as those after step `step`, and remove older ones.
        Raises OSError."""
        self._folder.mkdir(exist_ok=True)
        path = write_checkpoint(self._folder, step, self._origin, "weights", weights)
        for other in self._folder.iterdir():
            if other != path:
                shutil.rmtree(other)
        files = tuple(sorted(file.name for file in path.glob("weights-*")))
        return Checkpoint(path=path, step=step, origin=self._origin, files=files)

    def step(self) -> int | None:
        """The number of the step after which the weights in this folder were written, taken from a folder's name
        without reading its files; None where there are none."""
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self._folder.glob("step-*"))
        return [int(name) for name in names if name.isdigit()]

    def take(self, weights: Checkpoint) -> Checkpoint:
        """Move `weights`, which are in another folder on the same disk, into this one, in place of those here. Raises
        OSError."""
        self.remove()
        self._folder.mkdir()
        path = weights.path.rename(self._folder / weights.path.name)
        sync(self._folder)
        return replace(weights, path=path)

    def remove(self) -> None:
        """Remove the weights from disk, once the model folder is complete."""
        shutil.rmtree(self._folder, ignore_errors=True)


def weights_room(weight_bytes: int) -> int:
    """The most bytes that the files of trained weights take on disk, headers and manifest included, if the weights have
    `weight_bytes` bytes."""
    return weight_bytes + weight_bytes // 64 + 2**20


@contextlib.contextmanager
def room_kept(folder: Path, size: int, purpose: str = "the trained weights") -> Iterator[Callable[[], None]]:
    """A context that reserves `size` bytes on the disk of `folder` until it ends, or until the function that it gives
    is called. A file without a name holds the space, and goes when the process ends. On file systems without fallocate
    nothing is reserved. Raises UserError where the disk has no room. `purpose`: what the space is for, for the
    message."""
    with tempfile.TemporaryFile(dir=folder) as file:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate  # posix_fallocate writes where it cannot do that
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if size and fallocate(file.fileno(), 0, 0, size) != 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(OSError(number, os.strerror(number), str(folder)), purpose)
        yield file.close

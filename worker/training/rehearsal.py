"""Tries, before the first step, those operations that otherwise come late in a run, while the person who submitted the
job may still be there.

It tries an evaluation, a sample, a checkpoint that is read back, and the model folder without its weights. It does not
change what is learned, and leaves nothing behind. The run's own first steps are the rest of the trial."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from planner.errors import UserError, disk_full, first_line, is_disk_full
from planner.units import format_bytes, format_seconds
from worker.storage.checkpoint import Origin, TornCheckpoint, read_checkpoint, write_checkpoint
from worker.storage.shards import SHARD_BYTES
from worker.storage.trained import room_kept
from worker.training.evaluation import Evaluations
from worker.training.metrics import Metrics
from worker.training.stop import StopRequest

log = logging.getLogger(__name__)

TRIED = "rehearsed"
"""The event in metrics.jsonl; its key `tried` says what was tried."""
_FOLDER = ".step-rehearsal"  # `Checkpoints` removes folders of such names at the next start, if the process is killed

States = Callable[[], Iterator[tuple[str, Mapping[str, Tensor]]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rehearsal:
    """A trial, before a run's first step, of its evaluation, checkpoint and model folder. `checkpoints`: the folder of
    the checkpoints, which take `checkpoint_bytes` each. `states`: gives the tensors that a checkpoint holds.
    `write_files`: writes a model folder without its weights into an empty folder."""

    checkpoints: Path
    checkpoint_bytes: int
    origin: Origin
    states: States
    write_files: Callable[[Path], None]
    evaluations: Evaluations
    metrics: Metrics
    stop: StopRequest

    def run(self) -> None:
        """Try an evaluation, a sample, a checkpoint and the model folder's files, unless a stop is asked for. Raises
        the UserError that would otherwise end the run later."""
        began = time.perf_counter()
        self.evaluations.check()
        folder = self.checkpoints / _FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        tried = []
        try:
            for part in self._try(folder):
                tried.append(part)
                if self.stop.asked:
                    log.info("stopped before the first step")
                    return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        text = ", ".join(tried)
        self.metrics.write(TRIED, step=0, tried=text)
        log.info("tried before the first step: %s; in %s", text, format_seconds(time.perf_counter() - began))

    def _try(self, folder: Path) -> Iterator[str]:
        """Try one thing after another, each for about a step at most; yields what was tried, in words."""
        yield from self.evaluations.try_out()
        self._checkpoint(folder / "checkpoint")
        whole = self.checkpoint_bytes <= SHARD_BYTES
        yield "a checkpoint" if whole else f"the first {format_bytes(SHARD_BYTES)} of a checkpoint"
        self._files(folder / "output")
        yield "the files beside the weights"

    def _checkpoint(self, folder: Path) -> None:
        """Write about one file of a checkpoint, read it back, and check that the disk has room for a whole checkpoint.
        Raises UserError."""
        purpose = "a checkpoint, before the first step"
        folder.mkdir(parents=True)
        with room_kept(folder, self.checkpoint_bytes, purpose):
            pass
        try:
            path = write_checkpoint(folder, 0, self.origin, "state", self._first_states())
        except OSError as error:
            if not is_disk_full(error):
                raise
            raise disk_full(error, purpose) from error
        try:
            for file in path.iterdir():
                _forget(file)
            for _ in read_checkpoint(path).tensors():
                pass
        except (TornCheckpoint, OSError) as error:
            raise UserError(
                "A checkpoint that was read back differs from what was written.",
                code="disk-failed",
                numbers=(f"{first_line(error)}, in {folder}",),
                hint="check the disk before anything else",
            ) from error

    def _first_states(self) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """The first tensors, up to the size of one file. The last one is cut to that size, because an embedding alone
        may take gigabytes."""
        room = SHARD_BYTES
        with closing(self.states()) as states:  # type: ignore[type-var]
            for name, parts in states:
                most = max(1, room // sum(tensor.element_size() for tensor in parts.values()))
                some = {part: tensor.flatten()[:most] for part, tensor in parts.items()}
                yield name, some
                room -= sum(tensor.nbytes for tensor in some.values())
                if room <= 0:
                    return

    def _files(self, folder: Path) -> None:
        folder.mkdir()
        try:
            self.write_files(folder)
        except Exception as error:  # the libraries may raise anything
            if is_disk_full(error):
                raise disk_full(error, "the model folder, before the first step") from error
            if isinstance(error, UserError):
                raise
            raise UserError(
                "The trained model could not be saved in the end.",
                code="model-not-savable",
                numbers=(first_line(error),),
                hint="mend what it names in the folder of the model or the tokenizer",
            ) from error


def _forget(file: Path) -> None:
    """Drop a file from the page cache, as far as its file system can, so that it is read from the disk."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

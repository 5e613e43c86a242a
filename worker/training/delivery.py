"""Writes the model folder at the end of a run, from the trained weights, which are safe in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from planner.errors import Room, UserError, first_line, is_disk_full
from planner.job.output_dir import Place
from planner.run.folder import RunFolder
from worker.storage.checkpoint import Checkpoint
from worker.storage.model_folder import Output
from worker.storage.trained import TrainedWeights

log = logging.getLogger(__name__)


def without_overflow(
    dtypes: Mapping[str, torch.dtype], weights: Callable[[], Iterable[tuple[str, Mapping[str, Tensor]]]]
) -> Mapping[str, torch.dtype]:
    """The `dtypes` (name -> dtype) in which tensors are written, with bf16 in place of every fp16 if one of the
    `weights` (name -> {"master"}) has a number too large for fp16; a warning in the log then says so. Without fp16 they
    are returned as they are."""
    if torch.float16 not in dtypes.values():
        return dtypes
    most = torch.finfo(torch.float16).max
    for name, parts in weights():
        low, high = torch.aminmax(parts["master"])
        if max(-low, high) > most:
            log.warning("the model is written in bfloat16: %s has numbers above %g, too large for float16", name, most)
            return {name: torch.bfloat16 if dtype == torch.float16 else dtype for name, dtype in dtypes.items()}
    return dtypes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delivery:
    """Writes a run's trained model to `place`: the folder that the job names, or `output/` in the run folder."""

    run: RunFolder
    place: Place
    output: Output
    trained: TrainedWeights
    card: Callable[[int], str] | None = None
    """Gives the text of the model's README.md after a number of steps."""

    @property
    def at_home(self) -> Place:
        """The place `output/` in the run folder, to which the model goes if it cannot go where the job says."""
        return replace(self.place, folder=self.run.output)

    def deliver(self, trained: Checkpoint, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Path:
        """Write the model folder from the trained weights `trained`; returns its path.

        Raises UserError when the model cannot be written to its place. Then the trained weights are kept for `offmate
        retry`, and the model is in the run folder, if that has room.
        """
        try:
            path = self._write(self.place, trained, model, tokenizer)
        except Exception as error:
            if not isinstance(error, UserError | OSError) and not is_disk_full(error):
                raise
            raise self._kept(error, trained, model, tokenizer) from error
        self.tidy()
        return path

    def tidy(self) -> None:
        """Remove the trained weights, and the model in the run folder, that were kept only until the model is where the
        job says."""
        if self.place != self.at_home:
            self.at_home.withdraw()
        self.trained.remove()

    def _write(self, place: Place, trained: Checkpoint, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Path:
        weights = {name: parts["weight"] for name, parts in trained.tensors()}
        card = self.card(trained.step) if self.card is not None else None
        return self.output.write(place, model, tokenizer, weights, run=str(self.run.path), step=trained.step, card=card)

    def _kept(
        self, error: Exception, trained: Checkpoint, model: nn.Module, tokenizer: PreTrainedTokenizerBase
    ) -> UserError:
        """Write the model to the run folder, if that has room, and return the error to raise."""
        needs = Room(str(self.place.folder), sum(file.stat().st_size for file in trained.path.iterdir()))
        if isinstance(error, UserError):
            code, reasons = error.code, (error.what, *error.numbers)
        else:
            code = "disk-full" if is_disk_full(error) else "output-unwritable"
            reasons = (first_line(error),)
        whereabouts = f"the trained weights are kept in {trained.path}"
        if self.place != self.at_home:
            try:
                if self.at_home.published() != trained.step:
                    self._write(self.at_home, trained, model, tokenizer)
                whereabouts = f"the trained model is in {self.run.output}"
            except Exception as second:
                log.warning("the model folder has no room in the run folder either: %s", first_line(second))
        full = code == "disk-full"  # the job then waits for room
        mended = (
            "free some space there, and it goes there by itself"
            if full
            else (f"mend that, then offmate retry {self.run.path.name}")
        )
        return UserError(
            f"The job is trained, and its model could not go to {self.place.folder}.",
            code=code,
            numbers=(*reasons, whereabouts),
            hint=f"{mended}: nothing is trained again",
            needs=needs if full else None,
        )

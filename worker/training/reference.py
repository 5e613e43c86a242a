"""Computes how probable the reference model finds all answers of a job's preferences, once, before the first step.

The reference is the model as it is before training, or the job's `ref_model`. Its log-probabilities are kept in a file
of the run folder, so no second model is in memory while the job trains. The pass runs forward only, under the job's
plan. A pass that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planner.errors import UserError
from planner.job.base import content_of
from planner.job.schema import Job
from planner.keys.preference import PreferenceKeys
from planner.optimizers.table import OPTIMIZER_KEYS
from planner.run.folder import RunFolder
from planner.schedule.plan import Plan
from planner.units import counted, format_seconds
from worker.data.batches import Batches
from worker.storage.checkpoint import Origin
from worker.training.metrics import Metrics
from worker.training.stop import StopRequest

log = logging.getLogger(__name__)

_TOGETHER = 8  # batches given to the engine at once, between two looks at the stop request
_SAY_EVERY_S = 10.0
_LEARNING = frozenset(
    {
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "num_train_epochs",
        "max_steps",
        "max_grad_norm",
        "weight_decay",
        "decay_all",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "loraplus_lr_ratio",
        "loraplus_lr_embedding",
        *OPTIMIZER_KEYS,
        *(PreferenceKeys.model_fields.keys() - {"ref_model"}),
    }
)
"""Keys of a job that do not change its reference."""
_SHAPE = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")
"""Keys of a job that change the last bits of its reference."""


class Scored(Protocol):
    """The interface of an evaluation's result: see worker.engine.forward_only.Evaluation."""

    @property
    def figures(self) -> tuple[Tensor, ...]:
        """The log-probabilities of each batch's lines, [lines]."""


class Evaluates(Protocol):
    """The method of an engine that this module calls: see worker.engine.engine.Engine."""

    def evaluate(self, batches: list[dict[str, Tensor]]) -> Scored:
        """Run the model forward on each batch with the current weights, in evaluation mode."""


class Reference:
    """The reference's log-probabilities of a run's rows, those of its evaluation included. They are in the folder
    `reference` of the run, in an array [rows, 2] of fp32 that is nan where nothing is known yet."""

    def __init__(self, job: Job, batches: Batches, folder: RunFolder, plan: Plan, *, begun: bool = False) -> None:
        """`begun`: the run has a checkpoint, so its reference is the one that it began with."""
        self._batches, self._size = batches, job.slice_rows
        self._runs = folder.path.parent
        data, model, bits = _names(job, batches, folder, plan)
        # A run goes on with what it has computed, also under another plan and, if the user allows that, with other
        # files of its model. Of other runs it takes only what it would compute itself, to the last bit.
        own = sorted(folder.reference.glob(f"{data}-*.npy" if begun else f"{data}-{model}-*.npy"))
        self._bits, self._file = bits, folder.reference / f"{data}-{model}-{bits}.npy"
        if not self._file.exists() and own:
            self._file = own[0]

    @property
    def complete(self) -> bool:
        """Whether all log-probabilities are known, in this run's file or in that of another run of the same data, model
        and plan, which is copied. Then the batches have them."""
        if (found := self._whole(self._file)) is None and (found := self._of_another_run()) is None:
            return False
        self._give(found)
        return True

    def _of_another_run(self) -> NDArray[np.float32] | None:
        for other in sorted(self._runs.glob(f"*/{self._file.parent.name}/{self._file.name}")):
            if other != self._file and (found := self._whole(other)) is not None:
                log.info("reference: as run %s has computed it", other.parent.parent.name)
                self._write(found)
                return found
        return None

    def _whole(self, file: Path) -> NDArray[np.float32] | None:
        values = _read(file, self._shape)
        return None if values is None or np.isnan(values).any() else values

    def _write(self, values: NDArray[np.float32]) -> None:
        self._file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.save(file, values)
            os.fsync(file.fileno())  # else a power cut might leave zeros, which would count as known
        temporary.replace(self._file)

    def compute(self, engine: Evaluates, metrics: Metrics, stop: StopRequest) -> bool:
        """Compute the log-probabilities that are missing, with the weights that `engine` has. Returns False where a
        stop was asked for; what is done by then is kept. Raises UserError "non-finite"."""
        values = self._opened()
        missing: NDArray[np.bool_] = np.any(np.isnan(values), axis=1)
        count = int(missing.sum())
        began = said_at = time.monotonic()
        log.info("reference: %s of %d to be scored before the first step", counted(count, "row"), len(values))
        done = 0
        for numbers, batches in self._batches.unscored(missing, self._size, _TOGETHER):
            if stop.asked:
                values.flush()
                log.info("reference: interrupted after %d of %d rows, which are kept", done, count)
                return False
            for rows, sums in zip(numbers, _evaluated(engine, batches), strict=True):
                scores = sums.cpu().numpy().reshape(2, -1).T
                if not np.isfinite(scores).all():
                    raise _not_finite(int(rows[0]))
                done += int(missing[rows].sum())
                values[rows] = scores
            if (now := time.monotonic()) - said_at >= _SAY_EVERY_S:
                values.flush()
                left_s = (now - began) / done * (count - done)
                log.info("reference: %d of %d rows, %s left", done, count, format_seconds(left_s))
                said_at = now
        values.flush()
        seconds = time.monotonic() - began
        metrics.write("reference", step=0, rows=done, seconds=seconds)
        log.info("reference: %s scored in %s", counted(done, "row"), format_seconds(seconds))
        self._give(np.array(values))
        return True

    @property
    def _shape(self) -> tuple[int, int]:
        return sum(len(rows) for rows in self._batches.preferences), 2

    def _opened(self) -> np.memmap[tuple[int, ...], np.dtype[np.float32]]:
        """The run's file, made anew with nothing known where it is missing or damaged."""
        if _read(self._file, self._shape) is None:
            self._write(np.full(self._shape, np.nan, np.float32))
        elif not self._file.name.endswith(f"-{self._bits}.npy"):  # begun under another plan: no other run may take it
            mixed = self._file.with_name(f"{self._file.name.rpartition('-')[0]}-mixed.npy")
            self._file = self._file.replace(mixed)
        opened: np.memmap[tuple[int, ...], np.dtype[np.float32]] = np.load(self._file, mmap_mode="r+")
        return opened

    def _give(self, values: NDArray[np.float32]) -> None:
        first = 0
        for rows in self._batches.preferences:
            rows.reference = values[first : first + len(rows)]
            first += len(rows)


def _names(job: Job, batches: Batches, folder: RunFolder, plan: Plan) -> tuple[str, str, str]:
    """Texts that differ where the rows do, where the reference's weights do, and where the last bits of its
    log-probabilities may."""
    origin = Origin.of(job, data=batches.fingerprint, total_steps=0, plan=plan)
    keys = {key: value for key, value in origin.job.items() if key not in _LEARNING}
    shape = {key: keys.pop(key) for key in _SHAPE}
    rows = [[rows.corpus.fingerprint, _hash(rows.layout.content())] for rows in batches.preferences]
    weights = content_of(folder.read_base() or {}), _adapter(job)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    bits = [shape, origin.plan, machine, *map(version, ("torch", "transformers"))]
    return _digest(rows), _digest([keys, *weights]), _digest(bits)


def _adapter(job: Job) -> list[str]:
    """What differs where the adapter does that the job goes on from; empty where there is none, or it is gone."""
    files = sorted(Path(job.adapter_name_or_path).glob("adapter_*")) if job.adapter_name_or_path else []
    return [_hash(file.read_bytes()) for file in files]


def _digest(values: object) -> str:
    return _hash(json.dumps(values, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _evaluated(engine: Evaluates, batches: list[dict[str, Tensor]]) -> tuple[Tensor, ...]:
    """The log-probabilities of each batch's lines. Raises UserError "reference-does-not-fit"."""
    try:
        return engine.evaluate(batches).figures
    except UserError as error:
        if error.code != "evaluation-does-not-fit":
            raise
        raise UserError(
            "The pass of the reference does not fit the GPU budget.",
            code="reference-does-not-fit",
            exit_code=error.exit_code,
            numbers=error.numbers,
            hint="use a larger gpu_budget, or a smaller per_device_train_batch_size",
        ) from error


def gone(folder: RunFolder) -> UserError:
    """The error to raise where a run has a checkpoint, and its reference's log-probabilities are gone or damaged."""
    return UserError(
        "The reference's log-probabilities are gone or damaged.",
        code="reference-gone",
        numbers=(str(folder.reference),),
        hint="offmate rerun ID trains from the start",
    )


def _read(file: Path, shape: tuple[int, int]) -> NDArray[np.float32] | None:
    """The values in the file; None where there is none of this shape."""
    try:
        values = np.load(file)
    except (OSError, ValueError, EOFError):
        return None
    return values if isinstance(values, np.ndarray) and values.shape == shape and values.dtype == np.float32 else None


def _not_finite(row: int) -> UserError:
    return UserError(
        "The reference model gives an answer a probability that is not a number.",
        code="non-finite",
        numbers=(f"row {row} of the data, by length",),
        hint="check the weights of the model, or use bf16: false",
    )

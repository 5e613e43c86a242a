"""Changes a run's projectors when that is due, and writes down what came of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from worker.data.batches import Batches
from worker.storage.checkpoint import Checkpoint, Frozen
from worker.storage.shards import Item
from worker.subspace.change import HasWeights, Projectors, Trains
from worker.training.metrics import Metrics

log = logging.getLogger(__name__)


class _Engine(Trains, HasWeights, Protocol):
    steps_done: int

    def replace(self, tensors: Iterable[Item]) -> None:
        """Replace the weights and states of some tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """The changes of projectors of a run with `method: lsp`."""

    projectors: Projectors
    engine: _Engine
    batches: Batches
    metrics: Metrics

    def run_if_due(self) -> None:
        """Change the projectors, if that is due after the steps done so far."""
        step = self.engine.steps_done
        if not self.projectors.due(step):
            return
        batches = self.batches.sampled(step)
        done = self.projectors.change(self.engine, step, batches, self.batches.num_items(batches))
        log.info("lsp: %s", done)
        self.metrics.write(
            "projectors",
            step=step,
            changed=done.changed,
            seconds=done.seconds,
            gpu_peak_bytes=done.peak_bytes,
            bias_before=dict(done.before),
            bias_after=dict(done.after),
        )

    def resume(self, last: Checkpoint) -> None:
        """Give the engine the frozen weights of the checkpoint `last`."""
        self.engine.replace(last.frozen_tensors())

    def frozen(self, step: int) -> Frozen:
        """The frozen weights that a checkpoint of `step` builds on."""
        return Frozen(
            self.projectors.last_due(step), self.projectors.bytes, lambda: self.engine.frozen(self.projectors.names)
        )

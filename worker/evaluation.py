"""When a run evaluates, and the loss it writes down: the mean over all tokens to be predicted of all rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planner.job import Job
from planner.units import format_seconds
from worker.data import Batches
from worker.metrics import Metrics
from worker.rows import EvalBatches
from worker.stop import StopRequest

log = logging.getLogger(__name__)

_TOGETHER = 8  # batches given to the engine at once, between two looks at the stop request


class Losses(Protocol):
    """What an evaluation gives: see worker.forward.Evaluation."""

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """Per batch."""

    @property
    def peak_bytes(self) -> int | None:
        """On the device."""


class Evaluates(Protocol):
    """What an evaluation needs of an engine: see worker.engine.Engine."""

    steps_done: int

    def evaluate(self, batches: list[dict[str, Tensor]]) -> Losses:
        """The loss of each batch with the weights of now."""

    def check_evaluation(self, batches: list[dict[str, Tensor]]) -> None:
        """Raise UserError when it will not fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluations:
    """The evaluations of a run. `done`: the steps after which it has evaluated already, before a resume."""

    job: Job
    engine: Evaluates
    batches: Batches
    metrics: Metrics
    stop: StopRequest
    done: Collection[object] = ()

    def check(self) -> None:
        """Raise UserError now when an evaluation will not fit the budget."""
        if (held_out := self.batches.evaluation) is not None:
            self.engine.check_evaluation([held_out.batch(0)])

    def run_if_due(self) -> None:
        """Evaluate if it is due after the steps that are done. A stop ends it; it is made up for after a resume."""
        held_out, step = self.batches.evaluation, self.engine.steps_done
        if held_out is not None and step not in self.done and self._due(step):
            self._evaluate(held_out, step)

    def _due(self, step: int) -> bool:
        total = self.batches.total_steps
        if step in (0, total):
            return step == total or self.job.eval_on_start
        every = self.job.eval_every(total)
        if every is not None:
            return step % every == 0
        return self.batches.epochs(step) > self.batches.epochs(step - 1)

    def _evaluate(self, held_out: EvalBatches, step: int) -> None:
        began = time.perf_counter()
        loss, tokens = 0.0, 0
        peaks: list[int] = []
        for first in range(0, len(held_out), _TOGETHER):
            if self.stop.asked:
                log.info("evaluation: left out, the run is to stop")
                return
            batches = [held_out.batch(k) for k in range(first, min(first + _TOGETHER, len(held_out)))]
            found = self.engine.evaluate(batches)
            counts = torch.stack([batch["num_items_in_batch"] for batch in batches])
            each = torch.stack([value.float() for value in found.losses]).cpu()
            loss += float((each.double() * counts).sum())
            tokens += int(counts.sum())
            peaks += [] if found.peak_bytes is None else [found.peak_bytes]
        loss /= tokens
        seconds = time.perf_counter() - began
        self.metrics.write(
            "eval", step=step, eval_loss=loss, tokens=tokens, eval_s=seconds, gpu_peak_bytes=max(peaks, default=None)
        )
        log.info("step %d/%d  eval loss %.4f  %s", step, self.batches.total_steps, loss, format_seconds(seconds))

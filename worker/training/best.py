"""Finds the best evaluation of a run, and ends the run after enough evaluations without a better one.

The rules are those of transformers' Trainer and its `EarlyStoppingCallback`. They use only the losses of the
evaluations, which are in metrics.jsonl, so a run that goes on from a checkpoint comes to the same end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.job.schema import Job
from planner.run.events import Event
from planner.units import counted
from worker.storage.checkpoint import Checkpoint
from worker.storage.trained import TrainedWeights

log = logging.getLogger(__name__)

Evaluated = tuple[int, float]
"""An evaluation: the step after which it was made, and its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The best evaluation so far: its `step` and `loss`, 0 and infinity where no loss was a number. `without`: how many
    evaluations in a row, up to the last, did not improve on the best loss before them by more than the threshold."""

    step: int
    loss: float
    without: int


def losses_of(events: Sequence[Event]) -> list[Evaluated]:
    """The evaluations among a run's `events` (lines of metrics.jsonl), as (step, loss); a loss that is no number
    becomes nan."""
    evaluations = [(event["step"], event.get("eval_loss")) for event in events if event["event"] == "eval"]
    return [
        (step, float(loss) if isinstance(loss, (int, float)) else float("nan"))
        for step, loss in evaluations
        if isinstance(step, int)
    ]


def known_losses(events: Sequence[Event], last: Checkpoint | None) -> list[Evaluated]:
    """The evaluations, as (step, loss) in order, of a run that resumes from its checkpoint `last`: those that the
    checkpoint records, then those in `events` (lines of metrics.jsonl) from its step on; all in `events` where it
    records none. An evaluation missing from both is made again, with the same loss."""
    written = losses_of(events)
    if last is None or last.evaluations is None:
        return written
    known = dict(last.evaluations)
    return [*last.evaluations, *((step, loss) for step, loss in written if step >= last.step and step not in known)]


def standing(evaluations: Sequence[Evaluated], threshold: float) -> Standing | None:
    """The best evaluation among `evaluations`, which are (step, loss) in order, and how many followed it without an
    improvement by more than `threshold`; None without any. The untrained model (step 0) cannot be the best."""
    so_far: Standing | None = None
    for step, loss in evaluations:
        if step == 0:
            continue
        before = so_far or Standing(step=0, loss=math.inf, without=0)
        better = so_far is None or before.loss - loss > threshold
        best = (step, loss) if loss < before.loss else (before.step, before.loss)
        so_far = Standing(step=best[0], loss=best[1], without=0 if better else before.without + 1)
    return so_far


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Best:
    """Keeps the weights of a run's best evaluation in `kept`, where the job wants them, and decides about early
    stopping. `write`: writes the current weights."""

    job: Job
    kept: TrainedWeights
    write: Callable[[TrainedWeights], Checkpoint]

    @classmethod
    def wanted(cls, job: Job) -> bool:
        """Whether the job asks for the best model or for early stopping."""
        return job.load_best_model_at_end or job.early_stopping_patience is not None

    def ends(self, evaluations: Sequence[Evaluated], step: int) -> bool:
        """Decide, after `step` steps, whether early stopping ends the run now: returns True if so. If the evaluation
        after this step is the best one so far, its weights are kept first."""
        if not evaluations or evaluations[-1][0] != step:
            return False
        latest = standing(evaluations, self.job.early_stopping_threshold)
        if latest is None:
            return False
        if self.job.load_best_model_at_end and latest.step == step and self.kept.step() != step:
            self.write(self.kept)
            log.info("step %d: the best evaluation so far; its weights are kept", step)
        patience = self.job.early_stopping_patience
        if patience is None or latest.without < patience:
            return False
        log.info(
            "step %d: %s without a better one (early_stopping_patience); the best was that after step %d, "
            "loss %.4f: the training ends here",
            step,
            counted(latest.without, "evaluation"),
            latest.step,
            latest.loss,
        )
        return True

    def chosen(self, evaluations: Sequence[Evaluated]) -> Checkpoint | None:
        """The kept weights of the best evaluation, to be delivered at the end of training; None where the last step's
        weights are wanted, or are the only ones."""
        if not self.job.load_best_model_at_end:
            return None
        best = standing(evaluations, 0.0)
        if best is not None and not best.step:
            log.warning("no evaluation had a loss that is a number: the model is that of the last step")
            return None
        weights = self.kept.find()
        if best is None or weights is None or weights.step != best.step:
            log.warning("the weights of the best evaluation are damaged or gone: the model is that of the last step")
            return None
        log.info("the model is that after step %d, whose evaluation was the best: loss %.4f", best.step, best.loss)
        return weights

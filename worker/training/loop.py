"""Does the steps of a run, from the step at which it stands to its end or a request to stop."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.job.schema import Job
from planner.units import format_seconds
from worker.data.batches import Batches
from worker.data.padding import width
from worker.data.seeds import micro_batch_seed
from worker.storage.checkpoint import Checkpoints, finite, non_finite
from worker.storage.shards import Written
from worker.storage.states import StatesOnDisk
from worker.training.best import Best
from worker.training.changes import Changes
from worker.training.evaluation import Evaluates, Evaluations
from worker.training.learning_rate import learning_rate, learning_rates
from worker.training.metrics import Metrics
from worker.training.pair_figures import pair_figures, said_of
from worker.training.stop import StopRequest
from worker.training.timeline import Timeline

log = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0
_SAVE_SHARE = 20  # checkpoints by `save_minutes` take at most about 1/20 of the time


class StepResult(Protocol):
    """The interface of a step's result: see worker.engine.engine.StepResult."""

    @property
    def losses(self) -> Sequence[Tensor]:
        """The loss of each slice (micro-batch), as a 0-dimensional tensor."""

    @property
    def figures(self) -> Sequence[Tensor]:
        """What else the model's result had for each slice; empty for most models."""

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the gradients before clipping; None without clipping."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of device memory in use during the step; None where they were not counted."""


class Trains(Evaluates, Protocol):
    """The methods of an engine that the training loop calls: see worker.engine.engine.Engine."""

    @property
    def waited_s(self) -> float:
        """The seconds that computation has waited for copies and CPU updates so far."""

    def step(
        self,
        batches: Sequence[Mapping[str, Tensor]],
        *,
        seeds: Sequence[int],
        learning_rate: float | Sequence[float],
        **model_kwargs: Any,
    ) -> StepResult:
        """Do one optimizer step on `batches`, one for each slice (micro-batch); slice k runs under the random seed
        `seeds[k]`."""

    def drain(self) -> None:
        """Finish every update of the last step."""

    def stop_metering(self) -> None:
        """Stop counting bytes of device memory, where counting takes time."""

    def state(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master", moments}) of every trained tensor, in fp32."""

    def state_to_save(self) -> Iterator[Written]:
        """Yield (name, {"master", moments}) of every trained tensor in the form in which a checkpoint writes them;
        states on disk may only be named."""

    def masters(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"master"}) of every trained tensor: the fp32 weight, or its rounding if the fp32 weight is on
        disk."""

    def load_state(self, tensors: Iterable[tuple[str, Mapping[str, Tensor]]], *, step: int) -> None:
        """Continue from `tensors`, which `state()` gave after `step` steps."""

    def close(self) -> None:
        """End the engine's threads and free its memory."""


class _Metering:
    """Whether the device is metered (`on`). Metering ends after two steps, or once a step had a slice of the largest
    shape, which the plan is for, whichever is later; but after twenty steps at the latest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._steps = 0
        self._largest = False
        self.on = True

    def seen_enough(self, batches: Sequence[Mapping[str, Tensor]]) -> bool:
        """Note that a step on `batches` was done. Returns True at that step after which device bytes need no longer be
        counted."""
        if not self.on:
            return False
        self._steps += 1
        self._largest |= any(width(batch) == self._most for batch in batches)
        self.on = self._steps < (2 if self._largest else 20)
        return not self.on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Training:
    """The training loop of a run, from the step at which its engine stands (`engine.steps_done`). `state_bytes`: the
    bytes that a checkpoint takes on disk."""

    job: Job
    engine: Trains
    batches: Batches
    checkpoints: Checkpoints
    metrics: Metrics
    stop: StopRequest
    state_bytes: int
    states: StatesOnDisk | None = None
    """The optimizer states on disk, where there are any."""
    evaluations: Evaluations
    best: Best | None = None
    """Finds the best evaluation, where the job asks for that."""
    changes: Changes | None = None
    """Changes the projectors of `method: lsp`."""
    timeline: Timeline | None = None
    """Records two steps, where they are wanted."""
    predicted_s: Callable[[Sequence[Mapping[str, Tensor]]], float]
    """The predicted seconds of a step on these batches."""
    width: int
    """The width of the largest slice that the plan is for: see `worker.data.padding.width`."""

    def run(self) -> bool:
        """Train to the last step, finish every update, and return True. If a stop is asked for first, write a
        checkpoint and return False. A stop also cuts the last evaluation short, but not what comes after it.

        Raises UserError "non-finite" when the loss, the gradients' norm or the final weights and states are not
        finite."""
        total = self.batches.total_steps
        saved = self.engine.steps_done
        meter = _Metering(self.width)
        self.evaluations.check()
        saved_at = said_at = time.monotonic()
        save_s = 0.0
        while self.engine.steps_done < total:
            if self.stop.asked:
                if self.engine.steps_done > saved:
                    self._save()
                return False
            self.evaluations.run_if_due()
            if self.stop.asked:  # after another step, the resumed run could not make up for the evaluation
                continue
            if self._ends():
                self._check_state()
                return True
            if self.changes is not None:
                self.changes.run_if_due()
            batches = self.batches.step(self.engine.steps_done)
            if self.timeline is not None and not meter.on:
                self.timeline.before_step(batches)
            text = self._step(batches, self.engine.steps_done, total, metered=meter.on)
            if meter.seen_enough(batches):
                self.engine.stop_metering()
            done, now = self.engine.steps_done, time.monotonic()
            if done == total or done <= 3 or now - said_at >= _SAY_EVERY_S:
                log.info(text)
                said_at = now
            minutes = self.job.save_minutes
            late = minutes is not None and now - saved_at >= max(60 * minutes, _SAVE_SHARE * save_s)
            if (late or done % self.job.save_steps == 0) and done < total:
                self._save()
                saved, saved_at = done, time.monotonic()
                save_s = saved_at - now
        if not self.evaluations.run_if_due():
            if total > saved:
                self._save()
            return False
        self._ends()
        self._check_state()
        return True

    def _ends(self) -> bool:
        """Whether the evaluations say that the training is to end early."""
        return self.best is not None and self.best.ends(self.evaluations.losses, self.engine.steps_done)

    def _check_state(self) -> None:
        """Check that the final state is finite. Raises UserError "non-finite". No later loss and no checkpoint would
        show what the last step did."""
        step, last = self.engine.steps_done, self.checkpoints.last()
        if self.states is None:
            for _ in finite(self.engine.state(), step, last):
                pass
            return
        self.engine.drain()
        if (name := self.states.not_finite()) is not None:
            raise non_finite(f"a state of {name}", step, last)
        for _ in finite(self.engine.masters(), step, last):
            pass

    def _step(self, batches: list[dict[str, Tensor]], step: int, total: int, *, metered: bool) -> str:
        """Do step `step` (from 0) on `batches` and write its line of metrics. Returns a text about it for the log."""
        rate = learning_rate(self.job, step, total)
        began, waited_s = time.perf_counter(), self.engine.waited_s
        result = self.engine.step(
            batches,
            seeds=[micro_batch_seed(self.job.seed, step, k) for k in range(len(batches))],
            learning_rate=learning_rates(self.job, step, total),
            # A tensor, as transformers' Trainer passes it: a number would be a constant of the traced blocks, which
            # would have to be traced anew whenever it changes.
            num_items_in_batch=torch.tensor(self.batches.num_items(batches)),
        )
        loss = float(torch.stack([loss.detach().float() for loss in result.losses]).sum())
        norm = None if result.grad_norm is None else float(result.grad_norm)
        figures = pair_figures(self.job, batches, result.figures)
        step_s = time.perf_counter() - began
        tokens = self.batches.num_tokens(step)
        self.metrics.write(
            "step",
            step=step + 1,
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            step_s=step_s,
            tokens=tokens,
            gpu_peak_bytes=result.peak_bytes,
            waited_s=self.engine.waited_s - waited_s,
            metered=metered,
            predicted_step_s=self.predicted_s(batches),
            **figures,
        )
        for quantity, value in (("the loss", loss), ("the gradients' norm", norm)):
            if value is not None and not math.isfinite(value):
                raise non_finite(quantity, step + 1, self.checkpoints.last())
        shown = f"loss {loss:.4f}{said_of(figures)}"
        return f"step {step + 1}/{total}  {shown}  {format_seconds(step_s)}  {tokens / step_s:.0f} tokens/s"

    def _save(self) -> Path:
        self.engine.drain()
        began = time.perf_counter()
        step = self.engine.steps_done
        state = self.engine.state() if self.states is None else self.engine.state_to_save()
        losses = [known for known in self.evaluations.losses if known[0] <= step]
        frozen = None if self.changes is None else self.changes.frozen(step)
        path = self.checkpoints.save(step, state, self.state_bytes, self.states, losses, frozen)
        self.metrics.write("checkpoint", step=step, path=str(path))
        log.info("checkpoint: %s, in %s", path, format_seconds(time.perf_counter() - began))
        return path

"""When a run evaluates, and what it writes down: the mean loss of all rows, samples.

The mean is over all tokens to be predicted, or over all documents: as the job's loss is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from planner.job.schema import Job
from planner.units import format_seconds, printable
from worker.data.batches import Batches
from worker.data.padding import EvalBatches
from worker.training.metrics import Metrics
from worker.training.samples import Samples
from worker.training.stop import StopRequest

log = logging.getLogger(__name__)

_TOGETHER = 8  # batches given to the engine at once, between two looks at the stop request


class Losses(Protocol):
    """What an evaluation gives: see worker.engine.forward_only.Evaluation."""

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """Per batch."""

    @property
    def peak_bytes(self) -> int | None:
        """On the device."""


class Evaluates(Protocol):
    """What an evaluation needs of an engine: see worker.engine.engine.Engine."""

    steps_done: int

    def evaluate(self, batches: list[dict[str, Tensor]]) -> Losses:
        """The loss of each batch with the weights of now."""

    def check_evaluation(self, batches: list[dict[str, Tensor]]) -> None:
        """Raise UserError when it will not fit the budget."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int) -> list[list[int]]:
        """What the model says after each prompt with the weights of now."""

    def check_generation(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """Raise UserError when it will not fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluations:
    """The evaluations of a run. `done`: (event, step) of what it has written down already, before a resume."""

    job: Job
    engine: Evaluates
    batches: Batches
    metrics: Metrics
    stop: StopRequest
    samples: Samples | None = None
    done: Collection[tuple[object, object]] = ()
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of all so far, in their order."""

    def check(self) -> None:
        """Raise UserError now when an evaluation will not fit the budget."""
        if (held_out := self.batches.evaluation) is not None:
            self.engine.check_evaluation([held_out.batch(0)])
        if (samples := self.samples) is not None:
            self.engine.check_generation(samples.tokens, new_tokens=samples.new_tokens)

    def try_out(self) -> Iterator[str]:
        """Evaluate on the longest rows, and begin the answers to all prompts; nothing of it counts. What was done, in
        words; nothing where the whole of it is due at once."""
        if self.job.eval_on_start:
            return
        if (held_out := self.batches.evaluation) is not None:
            self.engine.evaluate([held_out.batch(0)])
            yield "an evaluation of the longest rows"
        if (samples := self.samples) is not None:
            begun = min(2, samples.new_tokens)  # the prompt, and a token after what is kept of it
            for answer in self.engine.generate(samples.tokens, new_tokens=begun, pad=samples.pad):
                samples.text(answer)
            yield "samples"

    def run_if_due(self) -> bool:
        """Evaluate if it is due after the steps that are done. False: a stop cut it short; after a resume from these
        steps it is made up for."""
        step = self.engine.steps_done
        if not self._due(step):
            return True
        held_out = self.batches.evaluation
        known = ("eval", step) in self.done or any(at == step for at, _ in self.losses)
        if held_out is not None and not known and not self._evaluate(held_out, step):
            return False
        if self.samples is not None and ("sample", step) not in self.done:
            if self.stop.asked:
                return False
            self._sample(self.samples, step)
        return True

    def _due(self, step: int) -> bool:
        total = self.batches.total_steps
        if step in (0, total):
            return step == total or self.job.eval_on_start
        every = self.job.eval_every(total)
        if every is not None:
            return step % every == 0
        return self.batches.epochs(step) > self.batches.epochs(step - 1)

    def _evaluate(self, held_out: EvalBatches, step: int) -> bool:
        """False: left out for a stop."""
        began = time.perf_counter()
        loss, items, tokens = 0.0, 0, 0
        peaks: list[int] = []
        for first in range(0, len(held_out), _TOGETHER):
            if self.stop.asked:
                log.info("evaluation: left out, the run is to stop")
                return False
            batches = [held_out.batch(k) for k in range(first, min(first + _TOGETHER, len(held_out)))]
            found = self.engine.evaluate(batches)
            counts = torch.stack([batch["num_items_in_batch"] for batch in batches])
            each = torch.stack([value.float() for value in found.losses]).cpu()
            loss += float((each.double() * counts).sum())
            items += int(counts.sum())
            tokens += sum(map(held_out.learned, batches))
            peaks += [] if found.peak_bytes is None else [found.peak_bytes]
        loss /= items
        seconds = time.perf_counter() - began
        self.metrics.write(
            "eval", step=step, eval_loss=loss, tokens=tokens, eval_s=seconds, gpu_peak_bytes=max(peaks, default=None)
        )
        self.losses.append((step, loss))
        log.info("step %d/%d  eval loss %.4f  %s", step, self.batches.total_steps, loss, format_seconds(seconds))
        return True

    def _sample(self, samples: Samples, step: int) -> None:
        answers = self.engine.generate(samples.tokens, new_tokens=samples.new_tokens, pad=samples.pad)
        for prompt, answer in zip(samples.texts, map(samples.text, answers), strict=True):
            self.metrics.write("sample", step=step, prompt=prompt, text=answer)
            log.info(
                "step %d/%d  sample: %s ⟦%s⟧", step, self.batches.total_steps, printable(prompt), printable(answer)
            )

"""Runs a run's evaluations when they are due: records the mean loss of all evaluation rows, and samples of generated
text.

Like the job's loss, the mean is over all tokens to be predicted, or over all documents."""

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
from worker.training.pair_figures import pair_figures, said_of
from worker.training.samples import Samples
from worker.training.stop import StopRequest

log = logging.getLogger(__name__)

_TOGETHER = 8  # batches given to the engine at once, between two looks at the stop request


class Losses(Protocol):
    """The interface of an evaluation's result: see worker.engine.forward_only.Evaluation."""

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The loss of each batch, as a 0-dimensional tensor."""

    @property
    def figures(self) -> tuple[Tensor, ...]:
        """What else the model's result had for each batch; empty for most models."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of device memory in use during the evaluation; None where they were not counted."""


class Evaluates(Protocol):
    """The methods of an engine that an evaluation calls: see worker.engine.engine.Engine."""

    steps_done: int

    def evaluate(self, batches: list[dict[str, Tensor]]) -> Losses:
        """The loss of each batch with the current weights and the model in evaluation mode."""

    def check_evaluation(self, batches: list[dict[str, Tensor]]) -> None:
        """Raise UserError if evaluating these batches would not fit the memory budget. Nothing is evaluated."""

    def generate(self, prompts: Sequence[Sequence[int]], *, new_tokens: int, pad: int) -> list[list[int]]:
        """The token ids, at most `new_tokens`, that the model generates after each prompt (a list of token ids) with
        the current weights. `pad`: the token id that fills up shorter answers."""

    def check_generation(self, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> None:
        """Raise UserError if generating `new_tokens` tokens after each prompt would not fit the memory budget. Nothing
        is generated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluations:
    """Runs the evaluations and samples of a run at the steps at which the job wants them. `done`: (event, step) of all
    lines that the run had written to metrics.jsonl before a resume."""

    job: Job
    engine: Evaluates
    batches: Batches
    metrics: Metrics
    stop: StopRequest
    samples: Samples | None = None
    done: Collection[tuple[object, object]] = ()
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(step, loss) of all evaluations so far, in order."""

    def check(self) -> None:
        """Raise UserError now if a later evaluation or sample of this run would not fit the memory budget."""
        if (held_out := self.batches.evaluation) is not None:
            self.engine.check_evaluation([held_out.batch(0)])
        if (samples := self.samples) is not None:
            self.engine.check_generation(samples.tokens, new_tokens=samples.new_tokens)

    def try_out(self) -> Iterator[str]:
        """Evaluate the longest rows, and generate the beginnings of the answers to all prompts, without recording
        anything. Yields what was done, in words. Does nothing where a whole evaluation is due before the first step
        anyway."""
        if self.job.eval_on_start:
            return
        if (held_out := self.batches.evaluation) is not None:
            self.engine.evaluate([held_out.batch(0)])
            yield "an evaluation of the longest rows"
        if (samples := self.samples) is not None:
            begun = min(2, samples.new_tokens)  # one token from the prompt, and one from its cache
            for answer in self.engine.generate(samples.tokens, new_tokens=begun, pad=samples.pad):
                samples.text(answer)
            yield "samples"

    def run_if_due(self) -> bool:
        """Evaluate if an evaluation is due after the steps done so far. Returns False if a request to stop cut it
        short; a run that resumes from this step then does it in full."""
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
        """Evaluate all batches; returns False where a stop was asked for meanwhile, and nothing was recorded."""
        began = time.perf_counter()
        loss, items, tokens = 0.0, 0, 0
        peaks: list[int] = []
        scored: list[tuple[dict[str, Tensor], Tensor]] = []
        for first in range(0, len(held_out), _TOGETHER):
            if self.stop.asked:
                log.info("evaluation: left out, the run is to stop")
                return False
            batches = [held_out.batch(k) for k in range(first, min(first + _TOGETHER, len(held_out)))]
            result = self.engine.evaluate(batches)
            counts = torch.stack([batch["num_items_in_batch"] for batch in batches])
            each = torch.stack([value.float() for value in result.losses]).cpu()
            loss += float((each.double() * counts).sum())
            items += int(counts.sum())
            tokens += sum(map(held_out.learned, batches))
            if result.figures:
                scored += zip(batches, result.figures, strict=True)
            peaks += [] if result.peak_bytes is None else [result.peak_bytes]
        loss /= items
        seconds = time.perf_counter() - began
        figures = pair_figures(self.job, *zip(*scored, strict=True)) if scored else {}
        self.metrics.write(
            "eval",
            step=step,
            eval_loss=loss,
            tokens=tokens,
            eval_s=seconds,
            gpu_peak_bytes=max(peaks, default=None),
            **{f"eval_{name}": value for name, value in figures.items()},
        )
        self.losses.append((step, loss))
        total, more = self.batches.total_steps, said_of(figures)
        log.info("step %d/%d  eval loss %.4f%s  %s", step, total, loss, more, format_seconds(seconds))
        return True

    def _sample(self, samples: Samples, step: int) -> None:
        answers = self.engine.generate(samples.tokens, new_tokens=samples.new_tokens, pad=samples.pad)
        for prompt, answer in zip(samples.texts, map(samples.text, answers), strict=True):
            self.metrics.write("sample", step=step, prompt=prompt, text=answer)
            log.info(
                "step %d/%d  sample: %s ⟦%s⟧", step, self.batches.total_steps, printable(prompt), printable(answer)
            )

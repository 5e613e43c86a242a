"""Does the same steps under a plan and in plain PyTorch, and compares losses, norms, parameters and moments element by
element."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from planner.disk import check_space
from planner.job.room import STATE_BYTES_PER_PARAMETER
from planner.job.schema import Job
from planner.reports.certificate import Difference, Finding
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from worker.check.plain_pytorch import PlainTraining
from worker.data.batches import Batches
from worker.data.seeds import micro_batch_seed
from worker.engine.engine import Engine
from worker.storage.checkpoint import non_finite
from worker.storage.shards import Item, read_shards, write_shards
from worker.subspace.change import Projectors, Trains
from worker.training.learning_rate import learning_rates, optimizer_of
from worker.training.model import check_reach, load_model
from worker.training.stored import open_scratch, passing_store

log = logging.getLogger(__name__)

_REFERENCE = "reference"
_FOUND = _REFERENCE, "losses", "gradient norms", "first moments' norm", "parameters", "moments"
_SORTS = {"master": "parameters", "exp_avg": "moments", "exp_avg_sq": "moments", "momentum_buffer": "moments"}


class _Result(Protocol):
    """The interface of a step's result: see worker.engine.engine.StepResult."""

    @property
    def losses(self) -> Sequence[Tensor]:
        """The loss of each slice (micro-batch), as a 0-dimensional tensor."""

    @property
    def grad_norm(self) -> Tensor | None:
        """The global norm of the gradients before clipping; None without clipping."""


Step = Callable[[list[dict[str, Tensor]], list[int], float | Sequence[float], Tensor], _Result]
"""A function that does a step on these batches, with these seeds, this learning rate and number of trained tokens."""

Score = Callable[[list[dict[str, Tensor]]], Sequence[Tensor]]
"""A function that gives the log-probabilities of each batch's lines, [lines], by the model as it begins."""

Numbers = list[tuple[str, str, Tensor]]
"""(sort, place, value) of each loss and norm that a run yields."""


class Outcome(NamedTuple):
    """The result of a comparison with plain PyTorch: the findings by sort (losses, parameters, …), the greatest
    difference within each parameter, and the greatest relative difference of the first step's losses and norm. The norm
    is the gradients', or the first moments' where no gradient norm is taken."""

    findings: tuple[Finding, ...]
    parameters: tuple[Difference, ...]
    first: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Compares the first `steps` steps of `job` under a plan with plain PyTorch, on `device`, for a model of its first
    `layers` layers. The final state of plain PyTorch is written to `folder`, so that only one of the two states is in
    memory."""

    job: Job
    batches: Batches
    steps: int
    layers: int
    device: torch.device
    folder: Path

    def run(self, plan: Plan, chain: Chain) -> Outcome:
        """Do the steps under `plan` and in plain PyTorch, and compare them. Raises UserError, also "non-finite" where
        plain PyTorch diverges."""
        expected, files = self._plain(plan, chain)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        model = load_model(self.job, layers=self.layers)
        projectors = Projectors(model, self.job)
        with contextlib.ExitStack() as left:
            states = left.enter_context(passing_store(self.job, plan, chain, model))
            scratch = left.enter_context(open_scratch(self.job, plan, chain))
            engine = Engine(
                model,
                plan=plan,
                chain=chain,
                optimizer=optimizer_of(self.job, model),
                max_grad_norm=self.job.max_grad_norm,
                device=self.device,
                states=states,
                scratch=scratch,
            )
            left.callback(engine.close)
            found = self._steps(
                "offmate",
                lambda batches, seeds, rate, items: engine.step(
                    batches, seeds=seeds, learning_rate=rate, num_items_in_batch=items
                ),
                lambda: _in_fp32(engine.state(), chain),
                self._changes(projectors, engine),
                lambda batches: engine.evaluate(batches).figures,
            )
            tallies = {sort: _Tally(sort) for sort in _FOUND}
            first = 0.0
            for (sort, place, value), (_, _, wanted) in zip(found, expected, strict=True):
                difference = tallies[sort].add(place, value, wanted)
                if place.split(",")[0] == _place(0):
                    first = max(first, difference / float(wanted.abs().max().clamp(min=1e-30)))
            wanted_states = dict(read_shards(files))
            still = (  # no gradient reaches these; plain PyTorch counts them as trained but leaves them unchanged
                (name, {"master": parts["master"].float()}) for name, parts in engine.frozen() if name in wanted_states
            )
            ours = itertools.chain(_in_fp32(engine.state(), chain), still)
            differences = tuple(_states(ours, wanted_states, tallies))
        return Outcome(tuple(tally.finding() for tally in tallies.values() if tally.count), differences, first)

    def _plain(self, plan: Plan, chain: Chain) -> tuple[Numbers, list[Path]]:
        """The numbers of plain PyTorch, and the files with its final state."""
        model = load_model(self.job, layers=self.layers)
        projectors = Projectors(model, self.job)
        check_reach(self.job, model, self.batches.largest_token, max(self.batches.lengths))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        check_space(self.folder, STATE_BYTES_PER_PARAMETER * trained, "what plain PyTorch has learned")
        plain = PlainTraining(
            model,
            optimizer=optimizer_of(self.job, model),
            max_grad_norm=self.job.max_grad_norm,
            device=self.device,
            on_cpu=plan.cpu_updated(),
            optimizers={t.name: t.optimizer for t in (*chain.tensors(), *chain.frame_tensors)},
        )
        numbers = self._steps(
            "plain PyTorch",
            lambda batches, seeds, rate, items: plain.step(batches, seeds=seeds, learning_rate=rate, items=items),
            plain.state,
            self._changes(projectors, plain),
            plain.figures,
        )
        for sort, place, value in numbers:
            if not torch.isfinite(value).all():
                raise non_finite(f"one of the {sort} of plain PyTorch ({place})", self.steps, None)
        return numbers, write_shards(self.folder, "plain", plain.state())

    def _changes(self, projectors: Projectors, trains: Trains) -> Callable[[int], None]:
        """A function that changes the projectors of `method: lsp`, if that is due after so many steps."""

        def change(step: int) -> None:
            if self.job.method == "lsp" and projectors.due(step):
                batches = self.batches.sampled(step)
                projectors.change(trains, step, batches, self.batches.num_items(batches))

        return change

    def _steps(
        self,
        who: str,
        step: Step,
        state: Callable[[], Iterator[Item]],
        before_step: Callable[[int], None],
        score: Score,
    ) -> Numbers:
        numbers: Numbers = self._reference(score) if self.job.refers else []
        for number in range(self.steps):
            before_step(number)
            batches = self.batches.step(number)
            seeds = [micro_batch_seed(self.job.seed, number, k) for k in range(len(batches))]
            rate = learning_rates(self.job, number, self.batches.total_steps)
            result = step(batches, seeds, rate, torch.tensor(self.batches.num_items(batches)))
            place = _place(number)
            numbers += [("losses", f"{place}, slice {k}", loss.cpu()) for k, loss in enumerate(result.losses)]
            if result.grad_norm is not None:
                numbers.append(("gradient norms", place, result.grad_norm.cpu()))
            elif number == 0:  # only after the first step do the moments depend on the gradients alone
                numbers.append(("first moments' norm", place, _first_moments_norm(state())))
            log.info("%s: step %d of %d", who, number + 1, self.steps)
        return numbers

    def _reference(self, score: Score) -> Numbers:
        """The log-probabilities of the rows of all steps, which become the reference of this side's steps."""
        numbers: Numbers = []
        rows = self.batches.preferences[0]
        for parts, batches in self.batches.unscored(self.batches.in_steps(self.steps), self.job.slice_rows, 1):
            for part, sums in zip(parts, score(batches), strict=True):
                scores = sums.cpu()
                numbers.append((_REFERENCE, f"before step 1, row {part[0]}", scores))
                rows.reference[part] = scores.numpy().reshape(2, -1).T
        return numbers


def _in_fp32(state: Iterator[Item], chain: Chain) -> Iterator[Item]:
    optimizers = {t.name: t.optimizer for t in (*chain.tensors(), *chain.frame_tensors)}
    return ((name, optimizers[name].in_fp32(parts)) for name, parts in state)


def _first_moments_norm(state: Iterator[Item]) -> Tensor:
    """The norm of the first moments of all tensors, in double precision. After one step it is the gradients' norm times
    1 - beta1 (or 1 - momentum). The sum is exact, so that one more tensor of zeros changes nothing."""
    first = (parts["exp_avg"] if "exp_avg" in parts else parts["momentum_buffer"] for _, parts in state)
    norms = (float(torch.linalg.vector_norm(moment, dtype=torch.float64)) for moment in first)
    return torch.tensor(math.sqrt(math.fsum(norm * norm for norm in norms)), dtype=torch.float64)


def _place(step: int) -> str:
    return f"step {step + 1}"


def _states(
    found: Iterator[Item], expected: dict[str, dict[str, Tensor]], tallies: dict[str, _Tally]
) -> Iterator[Difference]:
    for name, parts in found:
        wanted = expected.pop(name)
        differences = {
            part: tallies[sort].add(name, parts[part], wanted[part]) for part, sort in _SORTS.items() if part in parts
        }
        yield Difference(parameter=name, greatest=differences["master"])
    assert not expected, f"nobody trained {min(expected)}"


class _Tally:
    """Counts the comparisons of one sort (losses, parameters, …) and keeps the greatest difference."""

    def __init__(self, sort: str) -> None:
        self.sort, self.count, self.equal = sort, 0, 0
        self.greatest = self.size = 0.0
        self.at = ""

    def add(self, place: str, found: Tensor, expected: Tensor) -> float:
        """Compare `found` with `expected`, and count the result under `place`. Returns the greatest absolute difference
        of two elements."""
        self.count += 1
        same = torch.equal(found, expected)
        self.equal += same
        difference = 0.0 if same else _finite((found - expected).abs().max())
        size = _finite(expected.abs().max())
        if difference > self.greatest:
            self.greatest, self.at, self.size = difference, place, size
        elif not self.greatest:
            self.size = max(self.size, size)
        return difference

    def finding(self) -> Finding:
        """The result of all comparisons counted so far."""
        return Finding(
            what=self.sort, greatest=self.greatest, at=self.at, size=self.size, equal=self.equal, count=self.count
        )


def _finite(value: Tensor) -> float:
    number = float(value)
    return number if math.isfinite(number) else sys.float_info.max

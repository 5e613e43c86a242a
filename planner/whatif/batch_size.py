"""Decides the batch size (thesis 4.5.3): how many rows each micro-batch of a step has.

The job fixes the rows of a step, so learning stays as it is, and the best split is the one with the shortest step. The
thesis makes 1/b a variable of its program, takes all times as proportional to b, and rounds the answer. Here every
divisor of the rows is a candidate. A block's bytes and estimated times are affine functions of the rows, so tracing the
model for two numbers of rows gives the chains of all candidates. The time of a step that the solver finds for each
candidate says in which order to plan them, and when no other is likely to be better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from planner.errors import Exit, UserError
from planner.job.room import with_drive
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.measure.analysis import Analysis, analyse, estimate_times
from planner.models.files_of_weights import why_not_in_files
from planner.models.hf_model import masked_of
from planner.search.from_disk import with_disk
from planner.search.make_plan import GAP
from planner.search.problem import Problem
from planner.whatif.between import alike, between

_MOST = 16  # candidates
_MOST_ROWS = 1024  # of a micro-batch, unless the model needs all in one: far more rows gain nothing
WANTED = 3
"""The number of splits that are compared, and measured if possible: estimates do not see the time that small kernels
waste."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """One split of a step: `slices` micro-batches of `rows` rows each. `step_s`: estimated seconds of a step."""

    rows: int
    slices: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One split of a step into micro-batches of `rows` rows, with its planning problem. `hope_s`: the seconds of a step
    that the solver hopes for (`Problem.hope_s`). `traced`: the model was traced with this many rows; otherwise its
    figures are interpolated."""

    rows: int
    problem: Problem
    hope_s: float
    traced: bool


def hopeful(
    job: Job,
    device: torch.device,
    hardware: Hardware,
    *,
    distinct_tokens: tuple[int, ...] = (),
    runs: bool = False,
) -> list[Split]:
    """All splits of the job's `train_batch_size` into micro-batches, ordered by the step time that the solver hopes
    for. `runs`: the job is to run, and is not only asked about.

    Raises UserError for a model that cannot be used.
    """
    if masked_of(job):
        raise UserError(
            "The planner cannot choose the micro-batches of a mixture that trains with its router loss.",
            code="router-loss-per-slice",
            exit_code=Exit.USAGE,
            numbers=(f"train_batch_size: {job.train_batch_size}, and each micro-batch adds its own router loss",),
            hint="give per_device_train_batch_size and gradient_accumulation_steps, or router_aux_loss_coef: 0",
        )
    chains = _Chains(job, device, hardware, distinct_tokens, runs=runs)
    splits = []
    for rows in chains.candidates:
        problem = chains.problem(rows)
        splits.append(
            Split(rows=rows, problem=problem, hope_s=problem.hope_s(), traced=rows in (chains.few, chains.many))
        )
    # Of equal hopes the most rows first: fewer slices launch fewer kernels.
    return sorted(splits, key=lambda split: (split.hope_s, -split.rows))


def ranked(
    job: Job,
    device: torch.device,
    hardware: Hardware,
    *,
    distinct_tokens: tuple[int, ...] = (),
) -> list[BatchSplit]:
    """Splits of the job's `train_batch_size` into micro-batches that fit the budgets, the fastest by estimate first; of
    those within the gap of the fastest, the one with most rows first. Empty: none fits.

    Once there are `WANTED` splits, those for which the solver hopes for no shorter step are left out. Raises UserError
    for a model that cannot be used.
    """
    splits: list[BatchSplit] = []
    for split in hopeful(job, device, hardware, distinct_tokens=distinct_tokens, runs=True):
        best_s = min((c.step_s for c in splits), default=math.inf)
        if len(splits) >= WANTED and split.hope_s >= best_s:
            break
        try:
            plan = split.problem.plan()
        except UserError as error:
            if error.exit_code is not Exit.DOES_NOT_FIT:
                raise
            continue
        splits.append(BatchSplit(rows=split.rows, slices=split.problem.slices, step_s=plan.step_s))
    return best_first(splits)


def best_first(splits: list[BatchSplit]) -> list[BatchSplit]:
    """The splits ordered by the time of a step, but those within the gap of the fastest come first, most rows first."""
    best_s = min((c.step_s for c in splits), default=math.inf)
    equal = [c for c in splits if c.step_s <= best_s * (1 + GAP)]
    slower = [c for c in splits if c not in equal]
    return [*sorted(equal, key=lambda c: -c.rows), *sorted(slower, key=lambda c: c.step_s)]


class _Chains:
    """The job's chain for every number of rows: traced for two numbers, interpolated for others."""

    def __init__(
        self, job: Job, device: torch.device, hardware: Hardware, distinct_tokens: tuple[int, ...], *, runs: bool
    ) -> None:
        assert job.train_batch_size is not None
        self.job, self.hardware, self.total = job, with_drive(job, hardware), job.train_batch_size
        self.candidates = candidates(self.total)
        most = self._traced(self.candidates[-1], device)
        if not most.sums_slices:  # a mean over each micro-batch: only one of all rows is right
            self.candidates = [self.total]
            most = self._traced(self.total, device)
        self.many = self.candidates[-1]
        # A trace with one row has other strides, and special shapes.
        self.few = next((rows for rows in self.candidates if rows > 1), self.many)
        least = self._traced(self.few, device) if self.few < self.many else most
        self.not_in_files = why_not_in_files(job, most.model, runs=runs)
        self.low, self.high = alike(*(a.chain(estimate_times(a, hardware), distinct_tokens) for a in (least, most)))

    def _traced(self, rows: int, device: torch.device) -> Analysis:
        for_gpu = device.type == "cpu" and self.hardware.is_gpu
        return analyse(self.job.model_copy(update={"per_device_train_batch_size": rows}), device, for_gpu=for_gpu)

    def problem(self, rows: int) -> Problem:
        """The planning problem with micro-batches of `rows` rows."""
        job, machine = self.job, self.hardware
        share = (rows - self.few) / (self.many - self.few) if self.many > self.few else 1.0
        problem = Problem(
            chain=between(self.low, self.high, share),
            hardware=machine,
            slices=self.total // rows,
            gpu_budget_bytes=job.gpu_budget or machine.gpu_bytes,
            cpu_budget_bytes=job.cpu_budget or machine.cpu_bytes,
            clip=job.max_grad_norm is not None,
            not_in_files=self.not_in_files,
        )
        return with_disk(problem)


def candidates(total: int) -> list[int]:
    """The numbers of rows that a micro-batch may have if a step has `total` rows, ascending: the divisors of `total` up
    to 1024, or 16 of them, spread evenly over their logarithms."""
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = sorted(d for d in {*small, *(total // d for d in small)} if d <= _MOST_ROWS)
    wanted = [divisors[-1] ** (step / (_MOST - 1)) for step in range(_MOST)]
    return sorted({min(divisors, key=lambda d: abs(math.log(d / want))) for want in wanted})

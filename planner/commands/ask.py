"""Answers whether a job fits on any given machine, and how fast it is, from the model's config alone. No weights are
loaded and nothing is measured: times are estimated from operations, bytes and the machine's rates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from planner.cache.store import Cache, CachedPlan, Question
from planner.codec import to_json
from planner.commands.question import title_of
from planner.errors import UserError
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.machine.presets import CARDS, needed_cpu_memory, usable_gpu_bytes
from planner.models.hf_model import beyond_positions, masked_of, working_dtype
from planner.models.written import said_of_dtype
from planner.picture.files import NO_PICTURES, Pictures
from planner.reports.make_receipt import LAUNCHING, no_fit, receipt
from planner.reports.receipt import Asked, Receipt
from planner.schedule.plan import Plan
from planner.search.make_plan import GAP, round_up
from planner.search.problem import Problem
from planner.search.states_on_disk import with_all_on_disk
from planner.whatif.batch_size import WANTED, BatchSplit, best_first, hopeful
from planner.whatif.ways_to_fit import problem_of, ways_to_fit
from planner.whatif.what_helps import Variations, carried_over

PATIENCE_S = 17.0
"""Seconds from the process's start after which the answer is given, on a machine that does nothing else. What is not
planned by then is left out."""
_DEVICE = torch.device("cpu")  # blocks are traced there
_WAYS_S = 15.0  # to look for changes that fit, where the job does not: enough to trace both LoRA and a packed base
_PLAN_S = 5.0  # for the solver to make the plan itself
_TRACES = 2.5  # how much longer the trace of a changed job may take than its own: LoRA has many small tensors
_MOST_LARGER = 64  # how many times larger a single slice may become, in rows
_NEAR = 0.03  # splits this near the best are all planned before one is chosen: whole tensors may cost as much


def ask(
    job: Job, hardware: Hardware, *, started_s: float, pictures: Pictures = NO_PICTURES, cache: Cache | None = None
) -> Receipt:
    """The receipt of `job` on `hardware`: whether it fits, how fast it is, and what limits it.

    The answer is given within `PATIENCE_S` of `started_s` (monotonic clock, seconds) if the model's size allows, and
    some seconds later if the job does not fit. Its plan is taken from `cache`, or kept there unless a time limit ended
    the search. Raises UserError for a model that cannot be used.
    """
    with Variations() as others:
        clock, plan = _Clock(started_s), None
        if job.is_split:
            problem = problem_of(job, hardware, _DEVICE)
            clock.look()
        else:
            job, problem, plan = _chosen(job, hardware, others, clock)
        least = problem.least_bytes(enough=problem.gpu_budget_bytes)
        if least is not None and least <= problem.gpu_budget_bytes:
            plan, key = _kept(job, problem, plan, clock.stretched_s(_PLAN_S), cache)
            answer = receipt(plan, problem.chain, hardware, _asked(job), gap=GAP, rated_writes=job.disk_rated_writes)
            more = _larger_slices(job, hardware, answer, clock)
            # Only the answer's own limit: a variation has the same plan however busy the machine is, or none.
            others.start(problem, plan, max(1.0, clock.deadline - time.monotonic()), more=more or ())
            pictures.write(plan, problem.chain, hardware, title=title_of(job))
            changes, unplanned = others.changes(problem, plan, clock.deadline)
            complete = more is not None and not plan.cut_short
            answer = replace(answer, changes=changes, unplanned=unplanned, plan_key=key, complete=complete)
        else:
            answer = _too_large(job, problem, least, others, clock)
    notes = (beyond_positions(job), said_of_dtype(job))
    answer = replace(answer, notes=tuple(note for note in notes if note is not None))
    now = time.monotonic()
    in_time = answer.status == "infeasible" or now < clock.deadline
    complete = answer.complete and in_time and not answer.untried
    return replace(answer, answer_s=now - started_s, complete=complete)


def _kept(job: Job, problem: Problem, plan: Plan | None, limit_s: float, cache: Cache | None) -> tuple[Plan, str]:
    """The plan, and the key under which it is kept ("" if it is not kept). The plan is the cache's, or else `plan`, or
    else one made now."""
    if cache is None:
        return plan or problem.plan(limit_s), ""
    question = Question(
        chain=problem.chain,
        # A machine that is asked about is identified by its figures.
        machine=json.dumps(to_json(problem.hardware), sort_keys=True),
        gpu_budget_bytes=problem.gpu_budget_bytes,
        cpu_budget_bytes=problem.cpu_budget_bytes,
        slices=problem.slices,
        clip=problem.clip,
        measured=False,
        dtype=str(working_dtype(job)),
        exact=job.exact,
    )
    key = question.key()
    if (cached := cache.find_plan(key)) is not None:
        return cached.plan, key
    start = time.monotonic()
    plan = plan or problem.plan(limit_s)
    new = CachedPlan(plan=plan, chain=problem.chain, hardware=problem.hardware, solve_s=time.monotonic() - start)
    cache.keep_plan(key, new, model=job.model)
    return plan, "" if plan.cut_short else key


class _Clock:
    """Stretches time limits on a busy machine, where a limit in wall-clock time would change the answer. How many times
    slower the machine is shows while the model is traced."""

    def __init__(self, started_s: float) -> None:
        self._started_s, self._began_s, self._worked_s = started_s, time.monotonic(), time.process_time()
        self.slower = 1.0
        self._last_trace_s = self.deadline

    def look(self) -> None:
        """Find out how much slower the machine is than an idle one, by comparing wall-clock and processor time since
        the beginning. Call this once the model is traced: until then the process only computes."""
        took_s = time.monotonic() - self._began_s
        self.slower = max(1.0, took_s / max(time.process_time() - self._worked_s, 1e-3))
        self._last_trace_s = self.deadline - _TRACES * took_s

    def stretched_s(self, limit_s: float) -> float:
        """The limit `limit_s`, made longer as the machine is slower, in seconds of wall-clock time."""
        return limit_s * self.slower

    @property
    def deadline(self) -> float:
        """The time by which to answer, in seconds of the monotonic clock."""
        return self._started_s + self.stretched_s(PATIENCE_S)

    @property
    def last_trace(self) -> float:
        """The time after which no changed job is traced, since that would miss the deadline; in seconds of the
        monotonic clock."""
        return self._last_trace_s


def _chosen(job: Job, hardware: Hardware, others: Variations, clock: _Clock) -> tuple[Job, Problem, Plan | None]:
    """The job with the fastest split into micro-batches, its problem, and its plan if that was made on the way. Where
    no split fits, the job has the smallest micro-batches.

    All splits for which the solver hopes for nearly the best step are planned.
    """
    splits = hopeful(job, _DEVICE, hardware)
    clock.look()
    near = [split for split in splits if split.hope_s <= splits[0].hope_s * (1 + _NEAR)][:WANTED]
    plans = others.plans([split.problem for split in near], clock.stretched_s(_PLAN_S))
    known = {split.rows: (split, plan) for split, plan in zip(near, plans, strict=True) if plan is not None}
    candidates = [BatchSplit(rows=r, slices=s.problem.slices, step_s=p.step_s) for r, (s, p) in known.items()]
    rows = best_first(candidates)[0].rows if candidates else min(split.rows for split in splits)
    job = job.with_slices(rows)
    if rows in known and known[rows][0].traced:
        return job, known[rows][0].problem, known[rows][1]
    problem = problem_of(job, hardware, _DEVICE)
    return job, problem, known[rows][1] and carried_over(known[rows][1], problem) if rows in known else None


def _larger_slices(job: Job, hardware: Hardware, answer: Receipt, clock: _Clock) -> list[tuple[str, Problem]] | None:
    """Problems with larger slices (micro-batches), with a description each, for a step that takes as long as Python
    needs to launch its kernels.

    They have the same rows in fewer slices, until launching does not limit any more, or more rows if there is a single
    slice: a slice then has as many operations, but longer ones. None: there was no time to look. Empty for a mixture of
    experts that trains with its router loss: that loss is computed per slice, so the model would learn something else.
    """
    busy_s = {load.resource: load.busy_s for load in answer.loads}
    if answer.loads[0].resource != LAUNCHING or masked_of(job):
        return []
    if time.monotonic() >= clock.last_trace:
        return None
    need, rows, slices = busy_s[LAUNCHING] / busy_s["GPU computing"], job.slice_rows, job.gradient_accumulation_steps
    by = next((n for n in range(2, slices) if slices % n == 0 and n >= need), slices)
    if slices == 1:
        by = min(_MOST_LARGER, 2 ** math.ceil(math.log2(max(2.0, need))))
    split = {"per_device_train_batch_size": by * rows, "gradient_accumulation_steps": max(1, slices // by)}
    keys = ", ".join(f"{key}: {value}" for key, value in split.items())
    try:
        larger = problem_of(job.model_copy(update=split), hardware, _DEVICE)
    except UserError:
        return []
    return [(f"larger slices, of {by * rows} rows ({keys})", larger)]


def _asked(job: Job) -> Asked:
    return Asked(
        model=job.model,
        dtype="bf16" if job.bf16 else "fp32",
        length=job.max_length,
        rows=job.slice_rows,
        slices=job.gradient_accumulation_steps,
        clip=job.max_grad_norm is not None,
        keep=job.save_total_limit,
        whole=job.method == "full",
    )


def _too_large(job: Job, problem: Problem, least: int | None, others: Variations, clock: _Clock) -> Receipt:
    # With all states on disk, less host memory is enough.
    stored = with_all_on_disk(problem) if problem.hardware.disk_bytes else problem
    cpu_bytes = others.least_cpu_bytes(stored)  # computed while the ways are searched
    last_trace = max(clock.last_trace, time.monotonic() + clock.stretched_s(_WAYS_S))
    ways = list(ways_to_fit(job, problem, _DEVICE, last_trace, runs=False))
    least_cpu = cpu_bytes.get()
    answer = no_fit(
        problem.chain,
        problem.hardware,
        _asked(job),
        budgets=(problem.gpu_budget_bytes, problem.cpu_budget_bytes),
        least=(least, least_cpu),
    )
    fits_with = (*_more_machine(problem, least, least_cpu), *(str(way) for way in ways if way.least_bytes is not None))
    return replace(answer, fits_with=fits_with, untried=tuple(str(way) for way in ways if way.least_bytes is None))


def _more_machine(problem: Problem, least: int | None, least_cpu: int | None) -> Iterator[str]:
    """Descriptions of machines with more memory, on which the job fits as it is."""
    if least_cpu is not None and least_cpu > problem.cpu_budget_bytes:
        yield f"{needed_cpu_memory(least_cpu) // 2**30} GiB of RAM"
        parameters = sum(t.elements for t in problem.chain.tensors()) * problem.cpu_budget_bytes / least_cpu
        yield f"this host and a model of about {parameters / 1e9:.1f} billion parameters"
    if least is None or least <= problem.gpu_budget_bytes:
        return
    if least <= problem.hardware.gpu_bytes:
        yield f"more of this GPU (--gpu-budget {round_up(least)})"
    else:
        for name, card in sorted(CARDS.items(), key=lambda each: each[1].memory_bytes):
            if usable_gpu_bytes(card.memory_bytes) >= least:
                yield f"a GPU with {card.memory_bytes // 2**30} GiB (--hardware {name})"
                return

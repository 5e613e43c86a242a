"""Answers whether a job fits on any given machine, and how fast it is, from the model's config alone. No weights are
loaded and nothing is measured: times are estimated from operations, bytes and the machine's rates.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace

from planner.cache.store import Cache, CachedPlan, Question
from planner.codec import to_json
from planner.commands.kept_traces import Traces
from planner.commands.question import title_of
from planner.commands.tell import SILENT, Tell
from planner.errors import UserError
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.machine.cards import CARDS
from planner.machine.hardware import Hardware
from planner.machine.presets import needed_cpu_memory, smallest_card
from planner.picture.files import NO_PICTURES, Pictures
from planner.reports.make_receipt import LAUNCHING, no_fit, receipt, reference_s, reference_words
from planner.reports.receipt import Asked, Change, Receipt
from planner.schedule.plan import Plan
from planner.search.make_plan import GAP, round_up
from planner.search.problem import Problem
from planner.search.states_on_disk import with_all_on_disk
from planner.units import counted, format_bytes_down
from planner.whatif.traced import Traced
from planner.whatif.ways_to_fit import ways_to_fit
from planner.whatif.what_helps import Variations, best_of, carried_over, unplanned

_MOST_LARGER = 64  # how many times larger a single slice may become, in rows
_NEAR = 0.03  # splits this near the best are all planned before one is chosen: whole tensors may cost as much


def ask(
    job: Job,
    hardware: Hardware,
    *,
    tell: Tell = SILENT,
    pictures: Pictures = NO_PICTURES,
    cache: Cache | None = None,
    traces: Traces | None = None,
    helps: bool = True,
) -> Receipt:
    """The receipt of `job` on `hardware`: whether it fits, how fast it is, what limits it, and what would help.

    `tell` is told of what is done, of the receipt as soon as the plan is there, and of each line of what would help as
    it comes. Counts of work limit the search, never a clock, so the same question gets the same answer on a busy
    machine. The plan is taken from `cache`, or kept there; traces of models, from `traces`. Without `helps` the answer
    leaves out what would help, or make the job fit. Raises UserError for a model that cannot be used.
    """
    start_s, traces = time.monotonic(), traces or Traces()
    tell.doing("reading the model")
    with Variations() as others:
        plan = None
        if job.is_split:
            problem = traces.of(job, hardware).decided(job, hardware)
        else:
            job, problem, plan = _chosen(job, hardware, others, traces, tell)
        least = problem.least_bytes(enough=problem.gpu_budget_bytes)
        if least is not None and least <= problem.gpu_budget_bytes:
            tell.doing("solving")
            plan, key = _kept(job, problem, plan, cache)
            answer = receipt(plan, problem.chain, hardware, _asked(job), gap=GAP, rated_writes=job.disk_rated_writes)
            answer = replace(
                answer,
                plan_key=key,
                notes=(
                    *_of_budgets(job, hardware),
                    *traces.of(job, hardware).notes,
                    *_of_reference(job, plan, problem),
                ),
                least_gpu_budget_bytes=problem.least_bytes(),
            )
            pictures.write(plan, problem.chain, hardware, title=title_of(job))
            tell.so_far(answer)
            if helps:
                answer = _with_help(answer, job, problem, plan, others, traces, tell)
        else:
            answer = _too_large(job, problem, least, traces, tell, helps=helps)
    return replace(answer, answer_s=time.monotonic() - start_s)


def _of_budgets(job: Job, hardware: Hardware) -> Iterator[str]:
    """Notes for the user whose budgets are larger than what the machine has."""
    for key, budget, room in (
        ("gpu_budget", job.gpu_budget, hardware.gpu_bytes),
        ("cpu_budget", job.cpu_budget, hardware.cpu_bytes),
    ):
        if budget is not None and budget > room > 0:
            kind = "GPU" if key == "gpu_budget" else "host"
            has = f"the {format_bytes_down(room)} of {kind} memory that a job may use of this machine"
            yield f"{key} {format_bytes_down(budget)} is more than {has}: the plan counts on memory that is not there."


def _of_reference(job: Job, plan: Plan, problem: Problem) -> Iterator[str]:
    """A note on the pass before the first step, for a job whose loss compares the model with a reference."""
    if job.refers:
        seconds = reference_s(plan, problem.chain, problem.hardware)
        yield reference_words(seconds, plan.step_s, job.unit)


def _kept(job: Job, problem: Problem, plan: Plan | None, cache: Cache | None) -> tuple[Plan, str]:
    """The plan, and the key under which it is kept ("" if it is not kept). The plan is the cache's, or else `plan`, or
    else one made now."""
    if cache is None:
        return plan or problem.plan(), ""
    question = Question(
        chain=problem.chain,
        # A machine that is asked about is identified by its figures.
        machine=json.dumps(to_json(problem.hardware), sort_keys=True),
        gpu_budget_bytes=problem.gpu_budget_bytes,
        cpu_budget_bytes=problem.cpu_budget_bytes,
        slices=problem.slices,
        clip=problem.clip,
        measured=False,
        dtype="torch.bfloat16" if job.bf16 else "torch.float32",
        exact=job.exact,
    )
    key = question.key()
    if (cached := cache.find_plan(key)) is not None:
        return cached.plan, key
    start = time.monotonic()
    plan = plan or problem.plan()
    new = CachedPlan(plan=plan, chain=problem.chain, hardware=problem.hardware, solve_s=time.monotonic() - start)
    cache.keep_plan(key, new, model=job.model)
    return plan, key


def _chosen(
    job: Job, hardware: Hardware, others: Variations, traces: Traces, tell: Tell
) -> tuple[Job, Problem, Plan | None]:
    """The job with the fastest split into micro-batches, its problem, and its plan if that was made on the way. Where
    no split fits, the job has the smallest micro-batches.

    All splits for which the solver hopes for nearly the best step are planned.
    """
    with lasting_imports():  # torch takes seconds to import
        from planner.whatif.batch_size import WANTED, BatchSplit, best_first, hopeful
        from planner.whatif.trace import DEVICE
    splits = hopeful(job, DEVICE, hardware)
    near = [split for split in splits if split.hope_s <= splits[0].hope_s * (1 + _NEAR)][:WANTED]
    tell.doing(f"planning {counted(len(near), 'split')} of a step")
    plans = others.plans([split.problem for split in near])
    known = {split.rows: (split, plan) for split, plan in zip(near, plans, strict=True) if plan is not None}
    candidates = [BatchSplit(rows=r, slices=s.problem.slices, step_s=p.step_s) for r, (s, p) in known.items()]
    rows = best_first(candidates)[0].rows if candidates else min(split.rows for split in splits)
    job = job.with_slices(rows)
    if rows in known and known[rows][0].traced:
        return job, known[rows][0].problem, known[rows][1]
    problem = traces.of(job, hardware).decided(job, hardware)
    return job, problem, known[rows][1] and carried_over(known[rows][1], problem) if rows in known else None


def _with_help(
    answer: Receipt, job: Job, problem: Problem, plan: Plan, others: Variations, traces: Traces, tell: Tell
) -> Receipt:
    """The receipt with what would make the step shorter."""
    tell.doing("what would help")
    hardware = answer.hardware
    prospects, results = others.changes(problem, plan, more=_larger_slices(job, hardware, answer, traces))
    changes: list[Change] = []
    for number, change in enumerate(results, start=1):
        if change is not None:
            changes.append(change)
            tell.so_far(replace(answer, changes=best_of(changes)))
        tell.doing(f"what would help: {number} of {len(prospects)}")
    return replace(answer, changes=best_of(changes), unplanned=unplanned(prospects, changes))


def _larger_slices(job: Job, hardware: Hardware, answer: Receipt, traces: Traces) -> list[tuple[str, Problem]]:
    """Problems with larger slices (micro-batches), with a description each, for a step that takes as long as Python
    needs to launch its kernels.

    They have the same rows in fewer slices, until launching does not limit any more, or more rows if there is a single
    slice: a slice then has as many operations, but longer ones. Empty where the loss includes a mean over each slice,
    such as that of a mixture's routers: the model would learn something else.
    """
    busy_s = {load.resource: load.busy_s for load in answer.loads}
    if answer.loads[0].resource != LAUNCHING or traces.of(job, hardware).by_slice:
        return []
    need, rows, slices = busy_s[LAUNCHING] / busy_s["GPU computing"], job.slice_rows, job.gradient_accumulation_steps
    by = next((n for n in range(2, slices) if slices % n == 0 and n >= need), slices)
    if slices == 1:
        by = min(_MOST_LARGER, 2 ** math.ceil(math.log2(max(2.0, need))))
    split = {"per_device_train_batch_size": by * rows, "gradient_accumulation_steps": max(1, slices // by)}
    keys = ", ".join(f"{key}: {value}" for key, value in split.items())
    try:
        changed = job.model_copy(update=split)
        larger = traces.of(changed, hardware).decided(changed, hardware)
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
        whole=job.method != "lora",
        unit=job.unit,
    )


def _too_large(job: Job, problem: Problem, least: int | None, traces: Traces, tell: Tell, *, helps: bool) -> Receipt:
    # With all states on disk, less host memory is enough.
    stored = with_all_on_disk(problem) if problem.hardware.disk_bytes else problem
    tell.doing("how much memory it needs")
    least_cpu = stored.least_cpu_bytes()
    answer = no_fit(
        problem.chain,
        problem.hardware,
        _asked(job),
        budgets=(problem.gpu_budget_bytes, problem.cpu_budget_bytes),
        least=(least, least_cpu),
    )
    answer = replace(answer, notes=traces.of(job, problem.hardware).notes)
    tell.so_far(answer)
    if not helps:
        return answer

    def doing(text: str) -> None:
        tell.doing(f"what would make it fit: {text}")

    def traced(changed: Job) -> Traced:
        return traces.of(changed, problem.hardware)

    for way in ways_to_fit(job, problem, traced, runs=False, tell=doing):
        answer = replace(answer, fits_with=(*answer.fits_with, str(way)))
        tell.so_far(answer)
    answer = replace(answer, fits_with=(*answer.fits_with, *_more_machine(problem, least, least_cpu)))
    tell.so_far(answer)
    return answer


def _more_machine(problem: Problem, least: int | None, least_cpu: int | None) -> Iterator[str]:
    """Descriptions of machines with more memory, on which the job fits as it is."""
    if least_cpu is not None and least_cpu > problem.cpu_budget_bytes:
        ram_gib = needed_cpu_memory(least_cpu) // 2**30
        yield f"{ram_gib} GiB of RAM (--cpu-memory {ram_gib}GiB)"
        parameters = sum(t.elements for t in problem.chain.tensors()) * problem.cpu_budget_bytes / least_cpu
        yield f"this host and a model of about {parameters / 1e9:.1f} billion parameters"
    if least is None or least <= problem.gpu_budget_bytes:
        return
    if least <= problem.hardware.gpu_bytes:
        yield f"more of this GPU (--gpu-budget {round_up(least)})"
    elif (name := smallest_card(least)) is not None:
        yield f"a GPU with {CARDS[name].memory_bytes // 2**30} GiB (--hardware {name})"

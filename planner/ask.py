""" "Will it fit, and how fast?", for any machine, from the model's config alone: no weights are loaded, nothing is
measured. Times come from operations and bytes against the machine's rates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from planner.batch import ranked
from planner.chain import Chain
from planner.errors import Exit, UserError
from planner.hardware import Hardware
from planner.job import Job
from planner.jobpaths import looks_local, resolve
from planner.model import sample_batch, skeleton_model
from planner.picture.files import NO_PICTURES, Pictures
from planner.presets import CARDS, needed_cpu_memory, usable_gpu_bytes
from planner.profile import analyse_model, estimate_times
from planner.receipt import Asked, Receipt
from planner.reckon import no_fit, receipt
from planner.solve import GAP, least_budget, round_up
from planner.variations import Problem, Variations

PATIENCE_S = 17.0
"""When to answer, counted from the process's start: variations that are not planned by then are left out."""
_PLAN_S = 5.0  # of the solver for the plan itself
_SPLIT_S = 5.0  # for comparing micro-batches where the job leaves them to the planner
_SHORTEST = 256  # tokens; below that nobody trains
_NEAR_BYTES = 2**30  # as near as a least host budget is looked for


def question_job(
    model: str, *, length: int, rows: int, slices: int, bf16: bool, clip: bool, folder: Path
) -> Job:  # fmt: skip
    """The job that a question without a job file is about; it has no data.

    `model` is a hub id, a folder or a config.json. Raises UserError (exit 2) when there is no such file.
    """
    if looks_local(model, folder) or model.endswith(".json"):
        path = Path(resolve(model, folder))
        if not (path if path.is_file() else path / "config.json").is_file():
            raise UserError(
                f"There is no model config at {path}.", code="missing-file", exit_code=Exit.USAGE,
                hint="give a folder with config.json, the file itself, or a Hugging Face id",
            )  # fmt: skip
        model = str(path)
    return Job(
        model=model, tokenizer=model, dataset=("none",), max_length=length, per_device_train_batch_size=rows,
        gradient_accumulation_steps=slices, bf16=bf16, max_grad_norm=1.0 if clip else None,
    )  # fmt: skip


def ask(job: Job, hardware: Hardware, *, started_s: float, pictures: Pictures = NO_PICTURES) -> Receipt:
    """The receipt of `job` on `hardware`, within `PATIENCE_S` of `started_s` (monotonic) where the model's size allows.

    Raises UserError for a model that cannot be used.
    """
    deadline = started_s + PATIENCE_S
    job = _split(job, hardware)
    with Variations() as others:
        problem = _problem(job, hardware)
        others.start(problem)
        try:
            plan = problem.plan(min(_PLAN_S, max(1.0, (deadline - time.monotonic()) / 2)))
        except UserError as error:
            if error.exit_code is not Exit.DOES_NOT_FIT:
                raise
        else:
            found = receipt(plan, problem.chain, hardware, _asked(job), gap=GAP)
            pictures.write(plan, problem.chain, hardware, title=Path(job.model.removesuffix("/config.json")).name)
            changes = others.changes(problem, plan, deadline)
            return replace(found, changes=changes, answer_s=time.monotonic() - started_s)
    return replace(_too_large(job, problem, deadline), answer_s=time.monotonic() - started_s)


def _split(job: Job, hardware: Hardware) -> Job:
    """The job with the micro-batches that are the fastest; where none fits, with the smallest."""
    if job.is_split:
        return job
    best = ranked(job, torch.device("cpu"), hardware, patience_s=_SPLIT_S)
    return job.with_slices(best[0].rows if best else 1)


def _asked(job: Job) -> Asked:
    return Asked(
        model=job.model,
        dtype="bf16" if job.bf16 else "fp32",
        length=job.max_length,
        rows=job.slice_rows,
        slices=job.gradient_accumulation_steps,
        clip=job.max_grad_norm is not None,
        keep=job.save_total_limit,
    )


def _problem(job: Job, hardware: Hardware) -> Problem:
    return Problem(
        chain=_chain(job, hardware),
        hardware=hardware,
        gpu_budget_bytes=job.gpu_budget or hardware.gpu_bytes,
        cpu_budget_bytes=job.cpu_budget or hardware.cpu_bytes,
        slices=job.gradient_accumulation_steps,
        clip=job.max_grad_norm is not None,
    )


def _chain(job: Job, hardware: Hardware) -> Chain:
    device = torch.device("cpu")
    analysis = analyse_model(skeleton_model(job, device), sample_batch(job), device=device)
    return analysis.chain(estimate_times(analysis, hardware))


def _least(problem: Problem) -> int | None:
    """The least device budget beside the host's; None where the host is too small for any."""
    try:
        return least_budget(
            problem.chain, problem.hardware, cpu_budget_bytes=problem.cpu_budget_bytes, slices=problem.slices,
            clip=problem.clip,
        ).gpu_bytes  # fmt: skip
    except UserError:
        return None


def _too_large(job: Job, problem: Problem, deadline: float) -> Receipt:
    least = _least(problem)
    least_cpu = _least_cpu_budget(problem, deadline)
    fits_with = list(_more_machine(problem, least, least_cpu))
    fits_with += _other_job(job, problem, deadline)
    if least_cpu is None or least_cpu <= problem.cpu_budget_bytes:  # shorter slices are no help to a host that is full
        fits_with += _shorter_slices(job, problem, deadline)
    budgets = (problem.gpu_budget_bytes, problem.cpu_budget_bytes)
    return no_fit(
        problem.chain, problem.hardware, _asked(job), budgets=budgets, least=(least, least_cpu),
        fits_with=tuple(fits_with),
    )  # fmt: skip


def _least_cpu_budget(problem: Problem, deadline: float) -> int | None:
    """About the least host budget beside the device's budget, by bisection; None where no host is large enough."""

    def fits(size: int) -> bool:
        return _fits(replace(problem, cpu_budget_bytes=size))

    tensors = list(problem.chain.tensors())
    standing = sum(t.bytes + t.state_bytes for t in tensors)
    offloaded = sum(max(o.offloaded_bytes for o in b.options) for b in problem.chain.blocks)
    low = max(0, standing - problem.gpu_budget_bytes)  # all of it is somewhere
    high = standing + sum(t.gradient_bytes for t in tensors)
    if not fits(high):
        low, high = high, high + problem.slices * offloaded
        if not fits(high):
            return None
    while high - low > _NEAR_BYTES and time.monotonic() < deadline:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _more_machine(problem: Problem, least: int | None, least_cpu: int | None) -> Iterator[str]:
    """Machines on which the job fits as it is."""
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


def _other_job(job: Job, problem: Problem, deadline: float) -> Iterator[str]:
    """Ways to train that fit on the machine as it is."""
    if problem.clip and time.monotonic() < deadline and _fits(replace(problem, clip=False)):
        yield "no clipping (--clip none, max_grad_norm: 0)"
    if not job.bf16 and time.monotonic() < deadline:
        narrow = job.model_copy(update={"bf16": True})
        if _fits(_problem(narrow, problem.hardware)):
            yield "bf16 with fp32 masters (without --fp32, bf16: true)"


def _shorter_slices(job: Job, problem: Problem, deadline: float) -> Iterator[str]:
    """The largest slices that fit, halved from one row on."""
    rows, length = job.slice_rows, job.max_length
    while rows > 1 or length // 2 >= _SHORTEST:
        rows, length = (1, length) if rows > 1 else (1, length // 2)
        shorter = job.model_copy(update={"per_device_train_batch_size": rows, "max_length": length})
        if _fits(_problem(shorter, problem.hardware)):
            yield f"slices of {rows} × {length} tokens (--batch-size {rows} --max-length {length})"
            return
        if time.monotonic() > deadline:  # after one that was tried
            return


def _fits(problem: Problem) -> bool:
    least = _least(problem)
    return least is not None and least <= problem.gpu_budget_bytes

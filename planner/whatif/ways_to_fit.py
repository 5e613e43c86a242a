"""Finds changes with which a job fits that does not fit as it is. Each change was planned; none is guessed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from planner.errors import UserError
from planner.job.schema import Job
from planner.keys.lora import DEFAULTS, has_no_weights
from planner.machine.hardware import Hardware
from planner.measure.analysis import analyse, estimate_times
from planner.measure.drive import with_drive
from planner.models.files_of_weights import why_not_in_files
from planner.models.hf_model import masked_of
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.table import OPTIMIZERS
from planner.search.from_disk import with_disk
from planner.search.problem import Problem
from planner.search.states_on_disk import with_all_on_disk
from planner.units import format_bytes
from planner.whatif.batch_size import alike, between

_SHORTEST = 256  # tokens; below that nobody trains


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A change with which a job fits. `least_bytes`: the smallest device memory with which it then fits; None: there
    was no time to find out whether it fits, and `keys` are the changed keys of the job, with which to ask again."""

    text: str
    least_bytes: int | None
    keys: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        if self.least_bytes is None:
            values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.keys)
            asking = " ".join(f"--set {key}={value}" for key, value in values)
            return f"{self.text}; to ask about it: offmate plan … {asking}"
        return f"{self.text}: at least {format_bytes(self.least_bytes)} of GPU memory"


def problem_of(job: Job, hardware: Hardware, device: torch.device, *, runs: bool = False) -> Problem:
    """The problem of planning a job, whose split into micro-batches is given, on `hardware`. The model's blocks are
    traced on `device`. `runs`: the job is to run, and is not only asked about. Raises UserError."""
    analysis = analyse(job, device, for_gpu=device.type == "cpu" and hardware.is_gpu)
    problem = Problem(
        chain=analysis.chain(estimate_times(analysis, hardware)),
        hardware=with_drive(job, hardware),
        gpu_budget_bytes=job.gpu_budget or hardware.gpu_bytes,
        cpu_budget_bytes=job.cpu_budget or hardware.cpu_bytes,
        slices=job.gradient_accumulation_steps,
        clip=job.max_grad_norm is not None,
        not_in_files=why_not_in_files(job, analysis.model, runs=runs),
    )
    return with_disk(problem)


def ways_to_fit(job: Job, problem: Problem, device: torch.device, last_trace: float, *, runs: bool) -> Iterator[Way]:
    """Changes of the job's keys with which the job fits the budgets as they are, with the most and the longest rows
    that fit. Drives and adapters come first, which help where little else does, then changes that help a little.

    `runs`: the job is to run. Adapters need a model's weights, so LoRA is then not proposed if the model has none. If
    the job is only asked about, the model's config is enough.

    Most changes need a trace of the model's blocks. No trace is begun after `last_trace` (monotonic clock, seconds);
    later changes are returned untried.
    """

    def tried(text: str, **keys: object) -> Iterator[Way]:
        yield from _tried(text, job, problem, device, last_trace, runs=runs, **keys)

    plain = OPTIMIZERS[job.optim].on_disk
    storable = job.method == "full" and plain and not problem.hardware.disk_bytes
    if storable and (least := _least(with_all_on_disk(problem))):
        yield Way(text="optimizer states on a drive (disk_paths: a folder there; --drive pcie4)", least_bytes=least)
    mapped = replace(problem, not_in_files=None)
    wholly = job.method == "full" and problem.not_in_files is not None and bool(problem.hardware.disk_bytes)
    if wholly and (least := _least(with_all_on_disk(mapped))):
        yield Way(
            text="weights wholly on the drive, had the model's files them as they are trained (loading these takes "
            f"memory for all: {problem.not_in_files})",
            least_bytes=least,
        )
    yield from _adapters(job, tried, runs=runs)
    host_is_full = replace(problem, cpu_budget_bytes=2**62).fits()
    smaller = [] if host_is_full else list(_smaller_slices(job, problem, device, last_trace, runs=runs))
    yield from smaller
    if not job.bf16:
        yield from tried("bf16 with fp32 masters (bf16: true)", bf16=True)
    if problem.clip and (least := _least(replace(problem, clip=False))):
        yield Way(text="no clipping (max_grad_norm: 0)", least_bytes=least)
    if host_is_full and job.method == "full" and plain and not job.disk_paths:
        yield from tried("AdamW's moments in 8 bits, rounded (optim: adamw_8bit)", optim=AdamW8bit.kind)
    if not host_is_full and all(way.least_bytes is None for way in smaller):  # shorter slices do not help a full host
        yield from _shorter_slices(job, problem, device, last_trace, runs=runs)


def _adapters(job: Job, tried: Callable[..., Iterator[Way]], *, runs: bool) -> Iterator[Way]:
    """LoRA or, if that does not fit, LoRA with slices of one row or on a base in 4 bits. For a job that uses LoRA
    already, a base in 4 bits."""
    if job.method == "lora" and not (job.load_in_4bit or job.use_dora):
        other = {"load_in_8bit": False} if job.load_in_8bit else {}
        yield from tried("a base in 4 bits (load_in_4bit: true)", load_in_4bit=True, **other)
    if job.method != "full" or (runs and has_no_weights(job.model)):
        return
    lora: dict[str, object] = {**DEFAULTS, "method": "lora"}
    keys = "method: lora"
    if job.trainable:
        lora |= {"trainable": None, "trainable_layers": None}
        keys += ", without trainable"
    ways = list(tried(f"LoRA ({keys})", **lora))
    if not ways and job.slice_rows > 1 and not masked_of(job):
        text = f"LoRA ({keys}) in slices of one row (per_device_train_batch_size: 1)"
        ways = list(tried(text, **lora, **_rows(job, 1)))
    if not ways:
        text = f"LoRA on a base in 4 bits ({keys}, load_in_4bit: true)"
        ways = list(tried(text, **lora, load_in_4bit=True))
    yield from ways


def _tried(
    text: str, job: Job, problem: Problem, device: torch.device, last_trace: float, *, runs: bool, **keys: object
) -> Iterator[Way]:
    """The way if it fits, or untried if there is no time to find out."""
    if time.monotonic() >= last_trace:
        # Keys with LoRA's default values need not be typed.
        changed = tuple((key, value) for key, value in keys.items() if key not in DEFAULTS)
        yield Way(text=text, least_bytes=None, keys=changed)
    elif least := _least(_changed(job, problem, device, runs=runs, **keys)):
        yield Way(text=text, least_bytes=least)


def _smaller_slices(
    job: Job, problem: Problem, device: torch.device, last_trace: float, *, runs: bool
) -> Iterator[Way]:
    """The same step in more and smaller slices (micro-batches). Nothing for a mixture of experts that trains with its
    router loss: that loss is computed per slice, so the model would learn something else."""
    if job.slice_rows == 1 or masked_of(job):
        return
    if time.monotonic() >= last_trace:
        smaller = tuple(_rows(job, 1).items())
        yield Way(text="the same step in smaller slices", least_bytes=None, keys=smaller)
        return
    single_row = _changed(job, problem, device, runs=runs, **_rows(job, 1))
    if single_row is not None and (least := _least(single_row)):
        rows = _most_rows(job, problem, single_row)
        more = _least(_changed(job, problem, device, runs=runs, **_rows(job, rows))) if rows > 1 else None
        split = _rows(job, rows if more else 1)
        keys = ", ".join(f"{key}: {value}" for key, value in split.items())
        total = job.slice_rows * job.gradient_accumulation_steps
        text = f"the same step in smaller slices ({keys}; train_batch_size: {total} alone is auto)"
        yield Way(text=text, least_bytes=more or least)


def _shorter_slices(
    job: Job, problem: Problem, device: torch.device, last_trace: float, *, runs: bool
) -> Iterator[Way]:
    """Changes for when not even slices of one row fit: head and loss in chunks, or shorter rows."""
    if not masked_of(job):
        job = job.model_copy(update=_rows(job, 1))
    if job.exact:
        text = "head and loss in chunks, not bitwise (exact: false)"
        yield from _tried(text, job, problem, device, last_trace, runs=runs, exact=False)
    length = job.max_length // 2
    while length >= _SHORTEST:
        text = f"shorter rows (max_length: {length}, per_device_train_batch_size: {job.slice_rows})"
        ways = list(_tried(text, job, problem, device, last_trace, runs=runs, max_length=length))
        yield from ways
        if ways:
            return
        length //= 2


def _most_rows(job: Job, problem: Problem, single_row: Problem) -> int:
    """The most rows of a slice that fit, of the divisors of the step's rows. Chains are interpolated between that of
    one row and that of the job's slice."""
    total = job.slice_rows * job.gradient_accumulation_steps
    low, high = alike(single_row.chain, problem.chain)
    for rows in range(job.slice_rows - 1, 1, -1):
        if total % rows == 0:
            chain = between(low, high, (rows - 1) / (job.slice_rows - 1))
            if replace(problem, chain=chain, slices=total // rows).fits():
                return rows
    return 1


def _rows(job: Job, rows: int) -> dict[str, int]:
    """The keys of a job for so many rows in a slice and the same rows in a step."""
    total = job.slice_rows * job.gradient_accumulation_steps
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": total // rows}


def _changed(job: Job, problem: Problem, device: torch.device, *, runs: bool, **keys: object) -> Problem | None:
    """The problem of the job with other keys; None for a job that is not possible, such as LoRA without peft."""
    try:
        changed = problem_of(job.model_copy(update=keys), problem.hardware, device, runs=runs)
    except UserError:
        return None
    return replace(changed, gpu_budget_bytes=problem.gpu_budget_bytes, cpu_budget_bytes=problem.cpu_budget_bytes)


def _least(problem: Problem | None) -> int | None:
    """Device bytes that a problem needs at least; None where they are more than its budget, or there is no problem."""
    least = problem.least_bytes() if problem is not None else None
    return None if problem is None or least is None or least > problem.gpu_budget_bytes else least

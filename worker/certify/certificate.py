"""The certificate of a job: its first steps under its plan and in plain PyTorch, of as much of its model as fits."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from planner.cache.store import Cache
from planner.commands.answer import Answer
from planner.commands.plan_job import plan_job
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.measure.hf_model import masked_of, pairs_of, working_dtype
from planner.measure.tokenizer import load_tokenizer
from planner.reports.certificate import Certificate
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from worker.certify.comparison import Comparison
from worker.certify.layers_that_fit import Room, plain_bytes
from worker.data.batches import Batches

log = logging.getLogger(__name__)

_ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""By how much of their size losses and norm of the first step may differ where every bit cannot be had. In
fp32 what docs/exactness.md says; in bf16, whose numbers have 8 bits, gradients as near to those of fp32 as plain
PyTorch's.
"""


def certify(
    job: Job, *, steps: int, layers: int | None, device: torch.device, folder: Path, cache: Cache | None
) -> Certificate:
    """Do the first `steps` steps of `job` both ways. `layers`: with a model of its first layers; by default as many as
    plain PyTorch has room for. `folder` is for files on the way.

    Raises UserError, as the job would.
    """
    answer = plan_job(job, device, cache=cache, measure=True)
    job = job if job.is_split else job.with_slices(answer.rows)
    room = Room.of(answer.chain, device)
    pairs = pairs_of(job)
    batches = Batches(job, load_tokenizer(job), folder / "data", pairs=pairs, masked=masked_of(job))
    kept = room.layers() if layers is None else min(layers, room.all_layers)
    plan, chain = answer.plan, answer.chain
    if kept < room.all_layers and pairs:
        raise UserError(
            "An encoder-decoder is certified with all its layers.", code="not-certified", exit_code=Exit.USAGE,
            numbers=(f"{kept} of {room.all_layers}",), hint="leave --layers out, where plain PyTorch has room for it",
        )  # fmt: skip
    if kept < room.all_layers:
        log.info("with the first %d of the model's %d layers", kept, room.all_layers)
        chain = room.shorter(kept)
        plan = _shorter_plan(answer, chain)
    steps = min(steps, batches.total_steps)
    comparison = Comparison(job=job, batches=batches, steps=steps, layers=kept, device=device, folder=folder)
    outcome = comparison.run(plan, chain)
    program = compile_program(plan, chain)
    return Certificate(
        model=job.model, device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", steps=steps,
        slices=plan.rounds * plan.slices, layers=kept, all_layers=room.all_layers, plain_bytes=plain_bytes(room.chain),
        there_bytes=room.there_bytes, gpu_budget_bytes=plan.gpu_budget_bytes, gpu_peak_bytes=plan.gpu_peak_bytes,
        moved_bytes=sum(op.bytes for op in program.ops if op.kind in (OpKind.FETCH, OpKind.SEND)),
        cpu_updated=len(plan.cpu_updated()), options=plan.options, findings=outcome.findings,
        parameters=outcome.parameters, reasons=_reasons(job, device, chain), first=outcome.first,
        allowed=_ALLOWED[working_dtype(job)], rounded=chain.rounded_elements > 0,
    )  # fmt: skip


def _reasons(job: Job, device: torch.device, chain: Chain) -> tuple[str, ...]:
    """Why results may differ from plain PyTorch's within rounding."""
    chunks = () if job.exact else ("exact: false has the loss in chunks",)
    compiled = ("layers run compiled",) if any(o.compiled for b in chain.blocks for o in b.options) else ()
    return (*chunks, *compiled, *analyse(job, device).inexact)


def _shorter_plan(answer: Answer, chain: Chain) -> Plan:
    """A plan for the shorter chain, as hard pressed as the job's: its budget is the same share of what plain PyTorch
    takes, or the least possible."""
    plan, slices = answer.plan, answer.plan.rounds * answer.plan.slices
    least = Problem(
        chain=chain, hardware=answer.hardware, gpu_budget_bytes=0, cpu_budget_bytes=plan.cpu_budget_bytes,
        slices=slices, clip=plan.clip,
    ).least()  # fmt: skip
    share = plan.gpu_budget_bytes / plain_bytes(answer.chain)
    return Problem(
        chain=chain, hardware=answer.hardware, gpu_budget_bytes=max(least.gpu_bytes, int(share * plain_bytes(chain))),
        cpu_budget_bytes=plan.cpu_budget_bytes, slices=slices, clip=plan.clip,
    ).plan()  # fmt: skip

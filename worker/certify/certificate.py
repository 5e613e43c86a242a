"""Makes the certificate of a job: compares its first steps under its plan with plain PyTorch, for as many of the
model's layers as plain PyTorch has room for."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.measure.repeatable import Kernels
from planner.models.hf_model import pairs_of, working_dtype
from planner.reports.certificate import Certificate
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from worker.certify.comparison import Comparison
from worker.certify.its_plan import ItsPlan
from worker.certify.layers_that_fit import Room, plain_bytes

log = logging.getLogger(__name__)

_ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""The relative difference allowed between the first step's losses and norms where bit-equality is not possible. For
fp32 it is the bound in docs/exactness.md. For bf16, whose numbers have 8 bits, it allows gradients as near to those of
fp32 as plain PyTorch's are.
"""


def certify(
    found: ItsPlan, *, steps: int, layers: int | None, device: torch.device, folder: Path, kernels: Kernels
) -> Certificate:
    """Do the first `steps` steps of a job under its plan and in plain PyTorch, and compare them. `layers`: how many of
    the model's first layers to use; by default as many as plain PyTorch has room for. `folder`: for temporary files.
    `kernels`: the kernels that this process uses.

    Raises UserError, as the job would, and "not-certified" for an encoder-decoder that does not fit whole.
    """
    job, plan, chain, batches = found.job, found.plan, found.chain, found.batches
    room = Room.of(chain, device)
    kept = room.layers() if layers is None else min(layers, room.all_layers)
    if kept < room.all_layers and pairs_of(job):
        raise UserError(
            "An encoder-decoder is certified with all its layers.",
            code="not-certified",
            exit_code=Exit.USAGE,
            numbers=(f"{kept} of {room.all_layers}",),
            hint="leave --layers out, where plain PyTorch has room for it",
        )
    if kept < room.all_layers:
        log.info("with the first %d of the model's %d layers", kept, room.all_layers)
        chain = room.shorter(kept)
        plan = _shorter_plan(found, chain)
    steps = min(steps, batches.total_steps)
    comparison = Comparison(job=job, batches=batches, steps=steps, layers=kept, device=device, folder=folder)
    outcome = comparison.run(plan, chain)
    program = compile_program(plan, chain)
    return Certificate(
        model=job.model,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        steps=steps,
        slices=plan.rounds * plan.slices,
        layers=kept,
        all_layers=room.all_layers,
        plain_bytes=plain_bytes(room.chain),
        there_bytes=room.there_bytes,
        gpu_budget_bytes=plan.gpu_budget_bytes,
        gpu_peak_bytes=plan.gpu_peak_bytes,
        moved_bytes=sum(op.bytes for op in program.ops if op.kind in (OpKind.FETCH, OpKind.SEND)),
        cpu_updated=len(plan.cpu_updated()),
        options=plan.options,
        findings=outcome.findings,
        parameters=outcome.parameters,
        first=outcome.first,
        reasons=_reasons(job.with_lengths(found.batches.lengths), device, chain),
        allowed=_ALLOWED[working_dtype(job)],
        rounded=any(optimizer.rounds for optimizer in chain.optimizers),
        decided=found.decided and kept == room.all_layers,
        other_kernels=found.other_kernels,
        kernels=str(kernels),
        refused=kernels.refused,
    )


def _reasons(job: Job, device: torch.device, chain: Chain) -> tuple[str, ...]:
    """Why results may differ from plain PyTorch's within rounding."""
    chunks = () if job.exact else ("exact: false has the loss in chunks",)
    compiled = ("layers run compiled",) if any(o.compiled for b in chain.blocks for o in b.options) else ()
    return (*chunks, *compiled, *analyse(job, device).inexact)


def _shorter_plan(whole: ItsPlan, chain: Chain) -> Plan:
    """A plan for the shorter chain under as tight a GPU budget as the job's: the same share of what plain PyTorch
    takes, or the least possible budget where that share is too small."""
    plan, slices = whole.plan, whole.plan.rounds * whole.plan.slices
    least = Problem(
        chain=chain,
        hardware=whole.hardware,
        gpu_budget_bytes=0,
        cpu_budget_bytes=plan.cpu_budget_bytes,
        slices=slices,
        clip=plan.clip,
    ).least()
    share = plan.gpu_budget_bytes / plain_bytes(whole.chain)
    return Problem(
        chain=chain,
        hardware=whole.hardware,
        gpu_budget_bytes=max(least.gpu_bytes, int(share * plain_bytes(chain))),
        cpu_budget_bytes=plan.cpu_budget_bytes,
        slices=slices,
        clip=plan.clip,
    ).plan()

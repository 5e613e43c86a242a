"""Makes the certificate of a job: compares its first steps under its plan with plain PyTorch, for as many of the
model's layers as plain PyTorch has room for."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from transformers.utils import logging as transformers_logging

from planner.codec import to_json
from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.analysis import analyse
from planner.measure.machine_rates import gpu_bytes
from planner.measure.repeatable import Kernels, with_fallback
from planner.measure.target import device_of
from planner.models.hf_model import pairs_of, working_dtype
from planner.out_of_memory import told_to_people
from planner.reports.certificate import Certificate
from planner.schedule.chain import Block, Chain, Tensor
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.plan import Plan
from planner.search.problem import Problem
from planner.units import format_bytes
from worker.check.comparison import Comparison
from worker.check.its_plan import ItsPlan, its_plan
from worker.runtime.arena import take_over

log = logging.getLogger(__name__)

_MARGIN = 1.15  # autograd keeps more than the traced blocks do; the allocator has gaps
_HOST_SHARE = 0.8  # share of the free host memory to use
_ALLOWED = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""The relative difference allowed between the first step's losses and norms where bit-equality is not possible. For
fp32 it is the bound in docs/explanation/exactness.md. For bf16, whose numbers have 8 bits, it allows gradients as near
to those of fp32 as plain PyTorch's are.
"""


def answer(job: Job, options: argparse.Namespace) -> tuple[Exit, str]:
    """Make the certificate of `job`, which compares its first steps under its plan with plain PyTorch. Returns (exit
    code, the certificate as JSON); the code is 1 where a difference is greater than allowed. Raises UserError."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    device = device_of(options.device)
    if device.type == "cuda" and job.exact:  # other jobs need PyTorch's own allocator to measure compiled layers
        take_over()

    def compare(kernels: Kernels) -> Certificate:
        hint = "give it fewer layers, like --layers 2, or close other programs that use the device"
        with told_to_people("The device ran out of memory as the certificate was made.", hint=hint):
            data, anew = options.folder / "data", bool(kernels.refused)
            found = its_plan(job, options.run, device, data, options.database, anew=anew)
            return certify(
                found, steps=options.steps, layers=options.layers, device=device, folder=options.folder, kernels=kernels
            )

    certificate = with_fallback(compare, required=job.deterministic)
    return (Exit.DONE if certificate.holds else Exit.FAILED), json.dumps(to_json(certificate))


def certify(
    found: ItsPlan, *, steps: int, layers: int | None, device: torch.device, folder: Path, kernels: Kernels
) -> Certificate:
    """Do the first `steps` steps of a job under its plan and in plain PyTorch, and compare them. `found`: the job with
    its plan and data. `layers`: how many of the model's first layers to use; None: as many as plain PyTorch has room
    for. `folder`: for temporary files. `kernels`: the deterministic kernels that this process uses.

    Raises UserError, as the job would, and "not-certified" for an encoder-decoder that does not fit whole."""
    job, plan, chain, batches = found.job, found.plan, found.chain, found.batches
    room = Room.of(chain, device)
    kept = room.layers() if layers is None else min(layers, room.all_layers)
    if kept < room.all_layers and pairs_of(job):
        raise UserError(
            "An encoder-decoder can only be certified with all its layers.",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A job's chain (the model's blocks with their sizes), and the bytes that the device has for a step in plain
    PyTorch."""

    chain: Chain
    there_bytes: int

    @classmethod
    def of(cls, chain: Chain, device: torch.device) -> Room:
        """The room for `chain` on `device`: the budget of a GPU, or a share of the free host memory."""
        free = int(_HOST_SHARE * psutil.virtual_memory().available)
        return cls(chain=chain, there_bytes=gpu_bytes(device) if device.type == "cuda" else free)

    @property
    def all_layers(self) -> int:
        """The number of layers that the whole model has."""
        return len(self.chain.blocks) - 2

    def layers(self) -> int:
        """The number of the model's first layers that fit in plain PyTorch, at most all. Raises UserError "no-room"
        when not even one does."""
        found = next((n for n in range(self.all_layers, 0, -1) if plain_bytes(self.shorter(n)) <= self.there_bytes), 0)
        if found == 0:
            raise UserError(
                "There is no room for even one layer of this model in plain PyTorch.",
                code="no-room",
                exit_code=Exit.DOES_NOT_FIT,
                numbers=(
                    f"needed {format_bytes(plain_bytes(self.shorter(1)))}, there are {format_bytes(self.there_bytes)}",
                ),
                hint="certify a job of the same model with a smaller per_device_train_batch_size or max_length",
            )
        return found

    def shorter(self, layers: int) -> Chain:
        """A copy of the chain with only the model's first `layers` layers."""
        first, *middle, last = self.chain.blocks
        return replace(self.chain, blocks=(first, *middle[:layers], last))


def plain_bytes(chain: Chain) -> int:
    """About the number of bytes that a step of plain PyTorch takes, with all tensors on the device and all activations
    kept, one slice (micro-batch) at a time."""
    tensors = sum(map(_tensor_bytes, (*chain.tensors(), *chain.frame_tensors)))
    buffers = chain.frame_bytes - sum(t.bytes + t.state_bytes for t in chain.frame_tensors)
    kept = sum(map(_kept_bytes, chain.blocks))
    return int(_MARGIN * (tensors + buffers + kept + chain.blocks[-1].options[0].forward_peak_bytes))


def _tensor_bytes(tensor: Tensor) -> int:
    """Bytes of weight, gradient and states, and of the fp32 form of a narrower gradient. Moments count as fp32."""
    converted = 4 * tensor.elements if tensor.trainable and tensor.gradient_bytes < 4 * tensor.elements else 0
    moments = tensor.optimizer.moment_bytes(tensor.elements)
    wide = sum(4 * tensor.elements - size for size in moments) if tensor.trainable else 0
    return tensor.bytes + tensor.gradient_bytes + converted + tensor.state_bytes + wide


def _kept_bytes(block: Block) -> int:
    return block.input_bytes + max(option.saved_bytes for option in block.options)

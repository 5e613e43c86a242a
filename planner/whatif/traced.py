"""Holds what a trace of a job's model has found, for any machine. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.job.room import with_drive
from planner.job.schema import Job
from planner.machine.hardware import Hardware
from planner.machine.work import OptionWork, seconds_of
from planner.schedule.chain import Block, Chain, Tensor
from planner.search.from_disk import with_disk
from planner.search.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What a trace of a job's model has found. `chain`: its blocks with their bytes, without times. `work`: the
    operations of each kind of block under each option. `not_in_files`: why the model's files do not hold its frozen
    weights bit by bit, as in `planner.search.problem.Problem`. `by_slice`: the loss includes a mean over each
    micro-batch, such as that of a mixture's routers, so another split of the step changes what is learned.
    `has_experts`: the model is such a mixture. `notes`: what else to know about the job."""

    chain: Chain
    work: tuple[OptionWork, ...]
    not_in_files: str | None
    by_slice: bool
    has_experts: bool
    notes: tuple[str, ...] = ()

    def chain_on(self, hardware: Hardware) -> Chain:
        """The chain with the times that are estimated for `hardware`."""
        seconds = {
            (its.kind, its.option): (seconds_of(its.forward, hardware), seconds_of(its.backward, hardware))
            for its in self.work
        }

        def timed(block: Block) -> Block:
            options = []
            for option in block.options:
                forward_s, backward_s = seconds[block.kind, option.name]
                options.append(replace(option, forward_s=forward_s, backward_s=backward_s))
            return replace(block, options=tuple(options), tensors=tuple(map(updated, block.tensors)))

        def updated(tensor: Tensor) -> Tensor:
            if not tensor.optimizer.own_seconds:
                return tensor
            return replace(tensor, optimizer=tensor.optimizer.estimated(tensor.elements, hardware))

        return replace(
            self.chain,
            blocks=tuple(map(timed, self.chain.blocks)),
            frame_tensors=tuple(map(updated, self.chain.frame_tensors)),
        )

    def problem(self, job: Job, hardware: Hardware) -> Problem:
        """The problem of planning the job on `hardware`, before it is decided what is on disk."""
        return Problem(
            chain=self.chain_on(hardware),
            hardware=with_drive(job, hardware),
            gpu_budget_bytes=job.gpu_budget or hardware.gpu_bytes,
            cpu_budget_bytes=job.cpu_budget or hardware.cpu_bytes,
            slices=job.gradient_accumulation_steps,
            clip=job.max_grad_norm is not None,
            not_in_files=self.not_in_files,
        )

    def decided(self, job: Job, hardware: Hardware) -> Problem:
        """The problem of planning the job on `hardware`, in which it is decided what is on disk."""
        return with_disk(self.problem(job, hardware))

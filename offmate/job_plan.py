"""Defines what `offmate.plan` returns."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """How a job would run on a machine.

    fits              whether the job fits the memory budgets. If not, the figures of a step are 0,
                      and `options` and `stages` are empty
    why_not           if it does not fit: what is too small, for people; otherwise ""
    hardware          the machine's name
    measured          whether the plan rests on measurements of the job's blocks; otherwise times are estimated
    step_s            seconds of a training step
    bound_s           seconds that a step takes at least, whatever the schedule
    tokens_per_step   tokens that a step computes, padding included
    tokens_per_s      the same, per second
    gpu_bytes         the most bytes of GPU memory that a step holds
    cpu_bytes         the bytes of host memory that training holds
    gpu_budget_bytes  the bytes of GPU memory that the job may use
    cpu_budget_bytes  the bytes of host memory that the job may use
    rows              rows of a micro-batch
    micro_batches     micro-batches of a step
    options           what happens to the activations of each of the model's blocks, in their order, such as "keep"
    stages            a step, one line of text per stage: which block runs, and what is copied and updated meanwhile
    notes             what else to know, in sentences
    """

    fits: bool
    why_not: str = ""
    hardware: str
    measured: bool = False
    step_s: float = 0.0
    bound_s: float = 0.0
    tokens_per_step: int = 0
    tokens_per_s: float = 0.0
    gpu_bytes: int = 0
    cpu_bytes: int = 0
    gpu_budget_bytes: int = 0
    cpu_budget_bytes: int = 0
    rows: int = 0
    micro_batches: int = 0
    options: tuple[str, ...] = ()
    stages: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

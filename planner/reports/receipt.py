"""Defines the answers to "will this job fit, how fast, and how is it done?" as values to be shown."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.schedule.disk_use import DiskUse
from planner.schedule.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question of a receipt: a step has `slices` micro-batches of `rows` × `length` tokens. `keep`: how many
    checkpoints are kept; None for all. `whole`: the whole model is written at the end, not only adapters. `unit`: what
    a row is, in a word: with "pair" or "answer" each of the `rows` is two rows of tokens."""

    model: str
    dtype: str
    length: int
    rows: int
    slices: int
    clip: bool
    keep: int | None = 2
    whole: bool = True
    unit: str = "row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a memory or disk: its purpose in words, and its bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long one resource works in a step: in seconds, and as a share (0 to 1) of the step's time."""

    resource: str
    busy_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the machine or the job, and the speed with it: `factor` times as many tokens per second as without,
    with a new plan, or with the same plan under the change."""

    text: str
    factor: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A change of the machine or the job for which no plan was made. No schedule gets more than `most` times as many
    tokens per second from it."""

    text: str
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a job costs on a machine. `status`: "optimal" (proven to be within the gap of the optimum of the integer
    program, or of the lower bound for any schedule), "feasible", or "infeasible". If it is infeasible, no figures of a
    plan are set, but `least_…`, `fits_with` and `disk` are.

    `gpu`: what the device holds at its peak; `host`: what the host holds all the time; `disk`: the most that the run
    takes on disk; `disk_use`: what each step does to drives with optimizer states. `loads` begins with the resource
    that limits, `changes` with the change that helps most. `unplanned`: changes that may help and were not planned.
    `fits_with`: changes with which the job fits. `notes`: what else to know about the job. `plan_key`: the key of the
    kept plan; empty if none is kept.
    `least_gpu_budget_bytes` is for the given host budget, `least_cpu_budget_bytes` for the given GPU budget; None: no
    budget is enough. `step_s`, `lp_step_s`, `bound_s`, `solver_gap`: as in `planner.schedule.plan.Plan`.
    """

    status: str
    asked: Asked
    hardware: Hardware
    parameters: int
    trained_parameters: int
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    disk: tuple[Share, ...]
    disk_use: DiskUse | None = None
    gpu_peak_bytes: int = 0
    cpu_peak_bytes: int = 0
    gpu: tuple[Share, ...] = ()
    host: tuple[Share, ...] = ()
    step_s: float = 0.0
    lp_step_s: float = 0.0
    bound_s: float = 0.0
    solver_gap: float = 1.0
    tokens_per_step: int = 0
    tokens_per_s: float = 0.0
    options: tuple[str, ...] = ()
    cpu_update_share: float = 0.0
    loads: tuple[Load, ...] = ()
    changes: tuple[Change, ...] = ()
    unplanned: tuple[Prospect, ...] = ()
    least_gpu_budget_bytes: int | None = None
    least_cpu_budget_bytes: int | None = None
    fits_with: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan_key: str = ""
    answer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The plan of a chain on a machine, both read from files. `status`: as in `Receipt`. `step_s`: seconds of the
    simulated step; `lp_step_s`: the solver's objective before rounding; `bound_s`: a lower bound for any schedule;
    `solver_gap`: the solver's own gap. `cpu_update_share`: the share of the trained parameters that the CPU updates.
    The step has `rounds` × `slices` micro-batches. `resident`: the items on the device when a step begins."""

    status: str
    step_s: float
    lp_step_s: float
    bound_s: float
    solver_gap: float
    solve_s: float
    gpu_peak_bytes: int
    cpu_peak_bytes: int
    options: tuple[str, ...]
    cpu_update_share: float
    source: str
    rounds: int
    slices: int
    resident: tuple[str, ...]
    stages: tuple[Stage, ...]

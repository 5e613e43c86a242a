"""Holds the answers to "how is it done?" and "will it fit, and how fast?" as values to be shown."""

from __future__ import annotations

from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.schedule.disk_use import DiskUse
from planner.schedule.plan import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked about: `rows` × `length` tokens a slice, `slices` of them a step. `keep`: checkpoints that are
    kept, None for all. `whole`: the model is written, not adapters alone."""

    model: str
    dtype: str
    length: int
    rows: int
    slices: int
    clip: bool
    keep: int | None = 2
    whole: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of a memory or disk, under a name for people."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long a resource works in a step, in seconds and as a `share` of the step's time."""

    resource: str
    busy_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of machine or job: `factor` times as many tokens per second, planned anew, or by the same plan there."""

    text: str
    factor: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A change that was not planned: no schedule gets more than `most` times as many tokens per second from it."""

    text: str
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a job costs on a machine. `status`: "optimal" (proven to be within the gap of the O-ILP's optimum, or of the
    bound for any schedule), "feasible", or "infeasible"; where infeasible, no figures of a plan are set, but `least_…`,
    `fits_with` and `disk` are.

    `gpu` is what the device holds at its peak, `host` what the host holds all the time, `disk` what the run leaves on
    it at most, `disk_use` what each step does to drives with optimizer states. `loads` begins with the resource that
    limits, `changes` with the change that helps most. `unplanned`: changes that may help and were not planned.
    `untried`: ways that may fit and were not looked into. `notes`: what else to know about the job.
    `plan_key` is that of the kept plan, empty where none is kept. `cut_short`: a time limit ended the search for the
    plan, which is not kept then. `complete`: nothing was left out for lack of time.
    `least_gpu_budget_bytes` is for the given host budget, `least_cpu_budget_bytes` for the given GPU budget; None: no
    budget is enough.
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
    untried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    plan_key: str = ""
    cut_short: bool = False
    answer_s: float = 0.0
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A chain planned on a machine, both from files. `status` as in `Receipt`; `step_s` is the plan under the
    simulator, `lp_step_s` the solver's objective before rounding, `solver_gap` the solver's own, `bound_s` a bound for
    any schedule, `cpu_update_share` the share of the trained parameters that the CPU updates, `rounds` × `slices` how
    the step is cut, `resident` the items on the device when a step begins."""

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

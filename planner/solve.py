"""The planner: candidates from the greedy algorithms and the O-ILP; each verified and simulated, the fastest wins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.bound import lower_bound_s
from planner.chain import Chain
from planner.errors import Exit, UserError
from planner.greedy import Setting, candidates, frugal
from planner.hardware import Hardware
from planner.instance import UPDATE_TRAFFIC_BYTES, Budgets, make_instance
from planner.memory import cpu_peak_bytes, gpu_peak_bytes
from planner.oilp import Solution, solve_oilp
from planner.plan import Plan
from planner.program import OpKind, Program, compile_program
from planner.rounding import rounded_plans
from planner.simulate import simulate
from planner.units import format_bytes
from planner.verify import verify

TIME_LIMIT_S = 30.0
GAP = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The least device memory the planner can do with; `any_host_bytes` the same with unlimited host memory."""

    gpu_bytes: int
    any_host_bytes: int


def make_plan(
    chain: Chain,
    hardware: Hardware,
    *,
    gpu_budget_bytes: int,
    cpu_budget_bytes: int,
    slices: int,
    clip: bool,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    cpu_updates: bool = True,
    activation_offload: bool = True,
) -> Plan:
    """The fastest plan found within the budgets, with its prediction and its bounds.

    Raises UserError `budget-too-small` (exit 3), naming the least possible budget.
    """
    budgets = Budgets(
        gpu_bytes=gpu_budget_bytes, cpu_bytes=cpu_budget_bytes, cpu_updates=cpu_updates,
        activation_offload=activation_offload,
    )  # fmt: skip
    setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)
    return _Search(setting, time_limit_s, gap).best()


def least_budget(
    chain: Chain,
    hardware: Hardware,
    *,
    cpu_budget_bytes: int,
    slices: int,
    clip: bool,
    cpu_updates: bool = True,
    activation_offload: bool = True,
) -> LeastBudget:
    """The smallest device budget that `make_plan` accepts. Raises UserError when the host is too small for any."""

    def least(cpu_bytes: int) -> int:
        budgets = Budgets(
            gpu_bytes=0, cpu_bytes=cpu_bytes, cpu_updates=cpu_updates, activation_offload=activation_offload
        )
        setting = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)
        plan = _frugal(setting)
        return _peak_bytes(plan, chain)

    return LeastBudget(gpu_bytes=least(cpu_budget_bytes), any_host_bytes=least(2**62))


def predicted_step_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    """The simulated step, and not less than the host's memory takes for all transfers and CPU updates of a step."""
    elements = {t.name: t.elements for t in chain.tensors()}
    traffic = 0
    for op in program.ops:
        if op.kind in (OpKind.FETCH, OpKind.SEND):
            traffic += op.bytes
        elif op.kind is OpKind.CPU_UPDATE:
            traffic += UPDATE_TRAFFIC_BYTES * sum(elements[name] for name in op.names)
    return max(simulate(program, chain, hardware).step_s, traffic / hardware.cpu_memory_bytes_per_s)


def _peak_bytes(plan: Plan, chain: Chain) -> int:
    return gpu_peak_bytes(compile_program(plan, chain), chain)


def _frugal(setting: Setting) -> Plan:
    plan = frugal(
        setting, lambda p: _peak_bytes(p, setting.chain), lambda p: cpu_peak_bytes(p, setting.chain)
    )
    if plan is None:
        raise UserError(
            "No schedule fits this host memory budget.",
            code="host-memory-too-small",
            numbers=(f"budget {_format_down(setting.budgets.cpu_bytes)}",),
            hint="a larger --cpu-budget, or a smaller batch",
            exit_code=Exit.DOES_NOT_FIT,
        )
    return plan


class _Search:
    """The candidates of one problem and the best so far."""

    def __init__(self, setting: Setting, time_limit_s: float, gap: float) -> None:
        self.setting, self.gap = setting, gap
        self.deadline = time.monotonic() + time_limit_s
        self.solutions: list[Solution] = []

    def best(self) -> Plan:
        budgets = self.setting.budgets
        least = _frugal(self.setting)
        if self._peak_bytes(least) > budgets.gpu_bytes:
            raise _too_small(self.setting)
        bound_s = lower_bound_s(
            self.setting.chain, self.setting.hardware, budgets=budgets, slices=self.setting.slices,
            clip=self.setting.clip,
        )  # fmt: skip
        best: Plan | None = None
        for candidate in self._candidates(least):
            plan = self._rated(candidate)
            if best is None or plan.step_s < best.step_s:
                best = plan
            if self.solutions and best.step_s <= bound_s * (1 + self.gap):
                break  # nothing can be better by more than the gap
        assert best is not None  # the frugal plan is a candidate
        solved = min(self.solutions, key=lambda solution: solution.step_s, default=None)
        return replace(
            best,
            bound_s=bound_s,
            lp_step_s=solved.step_s if solved else 0.0,
            solver_gap=min(1.0, solved.gap) if solved else 1.0,
        )

    def _candidates(self, least: Plan) -> Iterator[Plan]:
        yield least
        yield from candidates(self.setting, self._fits)
        for barrier in (True, False):
            yield from self._solved(barrier)

    def _solved(self, barrier: bool) -> Iterator[Plan]:
        s = self.setting
        budgets = replace(s.budgets, barrier=barrier)
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            return
        instance = make_instance(s.chain, s.hardware, budgets=budgets, slices=s.slices, clip=s.clip)
        solution = solve_oilp(instance, time_limit_s=left_s, gap=self.gap)
        if solution is None:
            return
        self.solutions.append(solution)
        yield from rounded_plans(
            s.chain, s.hardware, solution, budgets=budgets, slices=s.slices, clip=s.clip, gap=self.gap,
            time_limit_s=max(left_s, 1.0), fits=self._fits, source="o-ilp" if barrier else "o-ilp without barriers",
        )  # fmt: skip

    def _fits(self, plan: Plan) -> bool:
        budgets = self.setting.budgets
        if cpu_peak_bytes(plan, self.setting.chain) > budgets.cpu_bytes:
            return False
        return self._peak_bytes(plan) <= budgets.gpu_bytes

    def _peak_bytes(self, plan: Plan) -> int:
        return _peak_bytes(plan, self.setting.chain)

    def _rated(self, plan: Plan) -> Plan:
        """The plan with its prediction. A candidate that `verify` rejects is our bug: InvalidProgram."""
        s = self.setting
        program = compile_program(plan, s.chain)
        verify(program, s.chain, gpu_budget_bytes=s.budgets.gpu_bytes)
        return replace(
            plan,
            step_s=predicted_step_s(program, s.chain, s.hardware),
            gpu_peak_bytes=gpu_peak_bytes(program, s.chain),
            cpu_peak_bytes=cpu_peak_bytes(plan, s.chain),
            gpu_budget_bytes=s.budgets.gpu_bytes,
            cpu_budget_bytes=s.budgets.cpu_bytes,
        )


def _too_small(setting: Setting) -> UserError:
    budgets = setting.budgets
    least = least_budget(
        setting.chain, setting.hardware, cpu_budget_bytes=budgets.cpu_bytes, slices=setting.slices, clip=setting.clip,
        cpu_updates=budgets.cpu_updates, activation_offload=budgets.activation_offload,
    )  # fmt: skip
    numbers = [f"budget {_format_down(budgets.gpu_bytes)}, least possible {format_bytes(least.gpu_bytes)}"]
    if least.any_host_bytes < least.gpu_bytes:
        numbers.append(
            f"host budget {_format_down(budgets.cpu_bytes)}; "
            f"with more host memory least possible {format_bytes(least.any_host_bytes)}"
        )
    return UserError(
        "No schedule fits this memory budget.",
        code="budget-too-small",
        numbers=tuple(numbers),
        hint=f"offmate submit job.yaml --gpu-budget {round_up(least.gpu_bytes)}",
        exit_code=Exit.DOES_NOT_FIT,
    )


def _format_down(count: int) -> str:
    """A budget as people read it, rounded down, so that it never looks as large as the least possible one."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            tenths = count * 10 // factor
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{count} B"


def round_up(count: int) -> str:
    """A size that `parse_bytes` reads as at least `count` bytes: "8GiB", "700MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 4 * factor:
            return f"{-(-count // factor)}{unit}"
    return str(count)

"""Other machines and jobs, planned anew beside the question's own plan: what would help, and by how much.

Processes of their own do it, because one thread solves one program; whoever has not answered in time is left out.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult, Pool

from planner.bound import lower_bound_s
from planner.chain import Chain
from planner.errors import UserError
from planner.hardware import Hardware
from planner.instance import Budgets
from planner.judge import predicted_step_s
from planner.plan import Plan
from planner.presets import usable_cpu_bytes
from planner.program import compile_program
from planner.receipt import Change
from planner.solve import make_plan

_GIB = 2**30
_SOLVER_S = 2.0
_WORTH = 1.02  # less is no help
_USED = 0.8  # of a budget: more of what is not used up is no help, whatever a luckier search finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question for the planner."""

    chain: Chain
    hardware: Hardware
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    slices: int
    clip: bool

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.slices * self.chain.slice_tokens

    def plan(self, time_limit_s: float) -> Plan:
        """The plan. Raises UserError."""
        return make_plan(
            self.chain, self.hardware, gpu_budget_bytes=self.gpu_budget_bytes, cpu_budget_bytes=self.cpu_budget_bytes,
            slices=self.slices, clip=self.clip, time_limit_s=time_limit_s,
        )  # fmt: skip

    def bound_s(self) -> float:
        """Seconds that no plan of it beats."""
        budgets = Budgets(gpu_bytes=self.gpu_budget_bytes, cpu_bytes=self.cpu_budget_bytes)
        return lower_bound_s(self.chain, self.hardware, budgets=budgets, slices=self.slices, clip=self.clip)


def variations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """One thing changed at a time."""
    hardware, chain = problem.hardware, problem.chain
    more = usable_cpu_bytes(64 * _GIB)
    yield "64 GiB more RAM", replace(problem, cpu_budget_bytes=problem.cpu_budget_bytes + more)
    extra = max(8, problem.gpu_budget_bytes // _GIB // 4) * _GIB
    text = f"{extra // _GIB} GiB more GPU memory"
    yield text, replace(problem, gpu_budget_bytes=problem.gpu_budget_bytes + extra)
    link = replace(hardware, h2d_bytes_per_s=2 * hardware.h2d_bytes_per_s, d2h_bytes_per_s=2 * hardware.d2h_bytes_per_s)
    yield "a link twice as fast", replace(problem, hardware=link)
    memory = replace(
        hardware, cpu_update_parameters_per_s=2 * hardware.cpu_update_parameters_per_s,
        cpu_memory_bytes_per_s=2 * hardware.cpu_memory_bytes_per_s,
    )  # fmt: skip
    yield "host memory twice as fast, CPU updates with it", replace(problem, hardware=memory)
    yield "a GPU that computes twice as fast", replace(problem, chain=_quicker(chain, 0.5))
    text = f"{2 * problem.slices} slices a step in place of {problem.slices}"
    yield text, replace(problem, slices=2 * problem.slices)


def _quicker(chain: Chain, factor: float) -> Chain:
    blocks = tuple(
        replace(
            block,
            options=tuple(
                replace(o, forward_s=factor * o.forward_s, backward_s=factor * o.backward_s) for o in block.options
            ),
        )
        for block in chain.blocks
    )
    return replace(chain, blocks=blocks)


class Variations:
    """Plans of variations, made in other processes until the context ends."""

    def __init__(self) -> None:
        # Not forked: this process has threads by now.
        self._pool: Pool = multiprocessing.get_context("spawn").Pool(max(2, min(4, (os.cpu_count() or 1) - 1)))
        self._running: list[tuple[str, Problem, AsyncResult[float | None]]] = []

    def __enter__(self) -> Variations:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()

    def start(self, problem: Problem) -> None:
        """Begin with those that promise most."""
        found = [(text, other, other.bound_s()) for text, other in variations(problem)]
        found.sort(key=lambda each: each[2] / each[1].tokens)
        for text, other, _ in found:
            self._running.append((text, other, self._pool.apply_async(_step_s, (other,))))

    def changes(self, problem: Problem, plan: Plan, deadline: float) -> tuple[Change, ...]:
        """Those that help, the best first; `deadline` by the monotonic clock."""
        found = []
        for text, other, result in self._running:
            if _is_idle(problem, plan, other):
                continue
            try:
                planned_s = result.get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                continue
            known = [s for s in (planned_s, _carried_over_s(problem, plan, other)) if s is not None]
            if not known:
                continue
            step_s = min(known)
            factor = (other.tokens / step_s) / (problem.tokens / plan.step_s)
            if factor >= _WORTH:
                found.append(Change(text=text, factor=factor, step_s=step_s, tokens_per_s=other.tokens / step_s))
        return tuple(sorted(found, key=lambda change: -change.factor))


def _is_idle(problem: Problem, plan: Plan, other: Problem) -> bool:
    """The other problem has more memory than this one, of a kind that the plan does not use up."""
    return (
        other.cpu_budget_bytes > problem.cpu_budget_bytes and plan.cpu_peak_bytes < _USED * problem.cpu_budget_bytes
    ) or (other.gpu_budget_bytes > problem.gpu_budget_bytes and plan.gpu_peak_bytes < _USED * problem.gpu_budget_bytes)


def _carried_over_s(problem: Problem, plan: Plan, other: Problem) -> float | None:
    """The plan itself, carried out on the other machine; it fits there, as no variation takes anything away."""
    if other.slices != problem.slices:
        return None
    return predicted_step_s(compile_program(plan, other.chain), other.chain, other.hardware)


def _step_s(problem: Problem) -> float | None:
    """In another process: the step of the problem's plan, None where there is none."""
    try:
        return problem.plan(_SOLVER_S).step_s
    except UserError:
        return None

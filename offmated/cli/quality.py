"""Says in one word how good a plan is, and what is proven of it."""

from __future__ import annotations

import math
from typing import Protocol

from planner.units import format_seconds

_OPTIMAL, _GOOD = 0.01, 0.05  # of the step: the most that a plan called so can be above the best
_STOPPED = 0.02  # a larger gap of the solver: its work was limited


class Planned(Protocol):
    """What has a plan's step time and what is proven of it, as `planner.schedule.plan.Plan`."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""

    @property
    def lp_step_s(self) -> float:
        """Seconds of the integer program's step before rounding to whole tensors; 0 if there is no such solution."""

    @property
    def bound_s(self) -> float:
        """Seconds that any schedule takes at least; 0 if no bound is known."""

    @property
    def solver_gap(self) -> float:
        """The solver's own gap (0.01 = 1%)."""


def quality(plan: Planned) -> str:
    """How good a plan is, in one word and with what is proven: the better of both proofs counts."""
    over = min((over for over, _ in _proven(plan)), default=math.inf)
    if over <= _OPTIMAL:
        return f"optimal: {proof(plan)}"
    if over <= _GOOD:
        return f"good: {proof(plan)}"
    return f"rough, because {_reason(plan)}: {proof(plan)}"


def proof(plan: Planned) -> str:
    """By how much, at most, the plan's step is longer than two lower bounds, in words and as far as proven: the time
    that any schedule takes, and the best that the planner's program allows."""
    return ", ".join(text for _, text in _proven(plan)) or "nothing is proven"


def _proven(plan: Planned) -> list[tuple[float, str]]:
    """What is proven, the tighter first: by how much the step is longer at most (0.01 = 1%), and in words."""
    proven = []
    if plan.bound_s > 0:
        over = _rounded_up(plan.step_s / plan.bound_s - 1)
        text = f"within {over:.1%} of what any schedule takes ({format_seconds(plan.bound_s)})"
        proven.append((over, text))
    if plan.lp_step_s > 0 and plan.solver_gap < 1:
        over = _rounded_up(plan.step_s / (plan.lp_step_s * (1 - plan.solver_gap)) - 1)
        proven.append((over, f"within {over:.1%} of the best that the planner's program allows"))
    return sorted(proven, key=lambda each: each[0])


def _reason(plan: Planned) -> str:
    if plan.lp_step_s <= 0:
        return "memory is so tight that the solver found no plan, and another method did"
    if plan.solver_gap > _STOPPED:
        return "the solver stopped at the limit of its work"
    return "only whole weights move, where the solver may move any part of them"


def _rounded_up(over: float) -> float:
    """`over` rounded up to a tenth of a percent, so that no more is claimed than was proven."""
    return max(0, math.ceil(1000 * over - 1e-6)) / 1000

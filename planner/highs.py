"""Solving a PuLP problem: HiGHS, with CBC as fallback. Statuses are read, not believed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pulp

# HiGHS has one thread pool per process: a second solve with another number returns zeros without an error.
_THREADS = 1


class SolverError(RuntimeError):
    """The solver broke: neither a solution, nor a proof that there is none, nor the end of its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`found`: the variables hold a solution. `infeasible`: proven that there is none; after a time limit both may be
    False. `gap` is between the solution and the solver's bound, 0.01 = 1%; `bound` in the objective's unit.
    """

    found: bool
    infeasible: bool
    gap: float
    bound: float


def solve(problem: pulp.LpProblem, *, time_limit_s: float, gap: float) -> Outcome:
    """Solve in place. Raises SolverError."""
    if pulp.HiGHS().available():
        problem.solve(pulp.HiGHS(msg=False, threads=_THREADS, timeLimit=max(0.1, time_limit_s), gapRel=gap))
        gap, bound = _highs_gap(problem)
    else:
        problem.solve(pulp.PULP_CBC_CMD(msg=False, threads=_THREADS, timeLimit=max(1.0, time_limit_s), gapRel=gap))
        bound = math.nan
    found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    infeasible = problem.status == pulp.LpStatusInfeasible
    if problem.status == pulp.LpStatusUnbounded:
        raise SolverError(f"{problem.name} is unbounded")
    return Outcome(found=found, infeasible=infeasible, gap=gap if found else math.inf, bound=bound)


def _highs_gap(problem: pulp.LpProblem) -> tuple[float, float]:
    info = problem.solverModel.getInfo()
    objective = info.objective_function_value
    integer = any(v.cat == "Integer" for v in problem.variables())
    bound = info.mip_dual_bound if integer else objective
    if not (math.isfinite(bound) and math.isfinite(objective)):
        return math.inf, bound
    return max(0.0, objective - bound) / max(abs(objective), 1e-12), bound

"""Solves a PuLP problem with HiGHS or, if that is not installed, with CBC. The outcome says what was proven."""

from __future__ import annotations

import logging
import math
import time
import warnings
from dataclasses import dataclass

import pulp

log = logging.getLogger(__name__)

# HiGHS has one thread pool per process: a second solve with another number returns zeros without an error.
_THREADS = 1
# Presolve's rule for forcing rows, bit 6. With it HiGHS 1.12 to 1.15 crash, or call infeasible what is not, on a few in
# ten thousand of these programs.
_PRESOLVE_RULE_OFF = 1 << 6


class SolverError(RuntimeError):
    """The problem is unbounded: its rows must be wrong. (An infeasible problem is an `Outcome`, not an error.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solver run. `found`: the variables hold a solution. `infeasible`: it is proven that there is
    none. After a time limit both may be False. `gap`: between the solution and the solver's bound, 0.01 = 1%. `bound`:
    the best possible objective, in its own unit."""

    found: bool
    infeasible: bool
    gap: float
    bound: float


def solve(problem: pulp.LpProblem, *, time_limit_s: float, gap: float) -> Outcome:
    """Solve `problem` in place, to within `gap` (0.01 = 1%) of the optimum. Raises SolverError."""
    start = time.monotonic()
    integer = any(variable.cat == pulp.LpInteger for variable in problem.variables())
    if pulp.HiGHS().available():
        problem.solve(
            pulp.HiGHS(
                msg=False,
                threads=_THREADS,
                timeLimit=max(0.1, time_limit_s),
                gapRel=gap,
                presolve_rule_off=_PRESOLVE_RULE_OFF,
            )
        )
        info = problem.solverModel.getInfo()
        bound = info.mip_dual_bound if integer else info.objective_function_value
    else:
        problem.solve(_cbc(time_limit_s, gap))
        # CBC does not tell its bound: where it says that it reached the gap that was asked for, the bound is that far.
        proven = problem.sol_status == pulp.LpSolutionOptimal
        bound = (pulp.value(problem.objective) or 0.0) / (1 + gap * integer) if proven else -math.inf
    found = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    infeasible = problem.status == pulp.LpStatusInfeasible
    if problem.status == pulp.LpStatusUnbounded:
        raise SolverError(f"{problem.name} is unbounded")
    if not found and not infeasible and time.monotonic() - start < time_limit_s:
        log.warning("the solver gave up on %s: %s", problem.name, pulp.LpStatus[problem.status])
    objective = pulp.value(problem.objective) or 0.0
    reached = max(0.0, objective - bound) / max(abs(objective), 1e-12) if found and math.isfinite(bound) else math.inf
    return Outcome(found=found, infeasible=infeasible, gap=reached, bound=bound)


def _cbc(time_limit_s: float, gap: float) -> pulp.LpSolver:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP is pinned below 4, where this one goes
        return pulp.PULP_CBC_CMD(msg=False, threads=_THREADS, timeLimit=max(1.0, time_limit_s), gapRel=gap)

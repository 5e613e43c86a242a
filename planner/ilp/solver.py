"""Solves a PuLP problem with HiGHS or, if that is not installed, with CBC. The outcome says what was proven."""

from __future__ import annotations

import logging
import math
import warnings
from dataclasses import dataclass
from typing import Any

import pulp

log = logging.getLogger(__name__)

# HiGHS has one thread pool per process: a second solve with another number returns zeros without an error.
_THREADS = 1
# Presolve's rule for forcing rows, bit 6. With it HiGHS 1.12 to 1.15 crash, or call infeasible what is not, on a few in
# ten thousand of these programs.
_PRESOLVE_RULE_OFF = 1 << 6
_FEASIBLE = 2  # HiGHS's status of a solution that meets all rows
_MOST_CHECKS = 600
"""How often HiGHS asks whether to go on before it is told to stop. Programs of models of up to 80 layers end after at
most a few hundred. This limit, unlike one in seconds, ends the same program at the same solution on any machine."""
_MOST_NODES = 3000  # the same limit for CBC, which counts nodes
_HANGS_S = 3600.0  # only for a solver that would never end


class SolverError(RuntimeError):
    """The problem is unbounded: its rows must be wrong. (An infeasible problem is an `Outcome`, not an error.)"""


class SolverGaveUp(RuntimeError):
    """The solver stopped at the limit of its work before it had a solution, or a proof that there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a solver run. `found`: the variables hold a solution. `infeasible`: it is proven that there is
    none. If the solver stopped early, both may be False. `gap`: between the solution and the solver's bound, 0.01 = 1%.
    `bound`: the best possible objective, in its own unit."""

    found: bool
    infeasible: bool
    gap: float
    bound: float


def solve(problem: pulp.LpProblem, *, gap: float, below: float = math.inf) -> Outcome:
    """Solve `problem` in place, to within `gap` (0.01 = 1%) of the optimum. The work is limited by counts alone, so the
    outcome does not depend on how busy the machine is. Raises SolverError.

    `below`: an objective that is not below this is of no use. Where the solver soon proves that there is nothing else,
    it stops and the outcome is `infeasible`; otherwise the solution found may be above it.
    """
    has_values = True
    integer = any(variable.cat == pulp.LpInteger for variable in problem.variables())
    if pulp.HiGHS().available():
        if below == math.inf or not _ends_soon(problem, gap, below):
            problem.solve(_highs(gap, _Patience()))
        elif not _objective(problem) < below:
            return Outcome(found=False, infeasible=True, gap=math.inf, bound=below)
        info = problem.solverModel.getInfo()
        # PuLP reports a solution also where HiGHS stopped before it had one.
        has_values = int(info.primal_solution_status) == _FEASIBLE
        bound = info.mip_dual_bound if integer else info.objective_function_value
    else:
        problem.solve(_cbc(gap))
        # CBC does not tell its bound: where it says that it reached the gap that was asked for, the bound is that far.
        proven = problem.sol_status == pulp.LpSolutionOptimal
        bound = _objective(problem) / (1 + gap * integer) if proven else -math.inf
    found = has_values and problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
    infeasible = problem.status == pulp.LpStatusInfeasible
    if infeasible and below < math.inf:
        bound = below
    if problem.status == pulp.LpStatusUnbounded:
        raise SolverError(f"{problem.name} is unbounded")
    if not found and not infeasible:
        log.warning("the solver gave up on %s: %s", problem.name, pulp.LpStatus[problem.status])
    objective = _objective(problem)
    reached = max(0.0, objective - bound) / max(abs(objective), 1e-12) if found and math.isfinite(bound) else math.inf
    return Outcome(found=found, infeasible=infeasible, gap=reached, bound=bound)


def _objective(problem: pulp.LpProblem) -> float:
    return pulp.value(problem.objective) or 0.0


def _ends_soon(problem: pulp.LpProblem, gap: float, below: float) -> bool:
    """Solve `problem` in place as far as the root of the search tree. Return whether that found an objective `below`
    this one to within the gap, or proved that there is none: then whatever is found is not below it."""
    problem.solve(_highs(gap, _Patience(most_nodes=1), objective_bound=below))
    import highspy

    return bool(problem.solverModel.getModelStatus() != highspy.HighsModelStatus.kInterrupt)


def _highs(gap: float, patience: _Patience, **options: float) -> pulp.LpSolver:
    return pulp.HiGHS(
        msg=False,
        threads=_THREADS,
        timeLimit=_HANGS_S,
        gapRel=gap,
        presolve_rule_off=_PRESOLVE_RULE_OFF,
        callbackTuple=(patience, None),
        callbacksToActivate=_asks_whether_to_go_on(),
        **options,
    )


class _Patience:
    """The callback that stops HiGHS once it has asked `_MOST_CHECKS` times whether to go on, or once it has explored
    `most_nodes` nodes of the search tree. (HiGHS's own limit of nodes ends in a status that PuLP does not know.)"""

    def __init__(self, *, most_nodes: float = math.inf) -> None:
        self._asked, self._most_nodes = 0, most_nodes

    def __call__(self, kind: Any, message: str, seen: Any, told: Any, data: Any) -> None:
        self._asked += 1
        if self._asked > _MOST_CHECKS or seen.mip_node_count >= self._most_nodes:
            told.user_interrupt = True


def _asks_whether_to_go_on() -> list[Any]:
    import highspy

    return [highspy.cb.HighsCallbackType.kCallbackMipInterrupt]


def _cbc(gap: float) -> pulp.LpSolver:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP is pinned below 4, where this one goes
        return pulp.PULP_CBC_CMD(msg=False, threads=_THREADS, timeLimit=_HANGS_S, maxNodes=_MOST_NODES, gapRel=gap)

"""The solver's work is limited by counts: the same program ends at the same solution on any machine."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import pulp
import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp import solver
from planner.ilp.instance import make_instance
from planner.ilp.program import solve_oilp
from planner.ilp.solver import Outcome, SolverGaveUp, solve
from tests.support.chains import HARDWARE, chain

BUDGETS = Budgets(gpu_bytes=10**9, cpu_bytes=10**9)


def hard_program() -> pulp.LpProblem:
    """A covering program that HiGHS ends after some hundred checks."""
    problem = pulp.LpProblem("cover", pulp.LpMinimize)
    chosen = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(60)]
    problem += pulp.lpSum(((37 * i) % 89 + 10) * x for i, x in enumerate(chosen))
    for row in range(30):
        problem += pulp.lpSum(((29 * i + 53 * row * (i % 7)) % 97 + 1) * x for i, x in enumerate(chosen)) >= 1200
    return problem


def solved(most_checks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, float]:
    monkeypatch.setattr(solver, "_MOST_CHECKS", most_checks)
    problem = hard_program()
    outcome = solve(problem, gap=0.0)
    return outcome, pulp.value(problem.objective)


def test_a_limit_on_checks_ends_the_same_program_at_the_same_solution_whatever_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, best = solved(10**6, monkeypatch)
    assert whole.found and whole.gap == pytest.approx(0.0, abs=1e-6)
    first, value = solved(20, monkeypatch)
    assert first.found and not first.infeasible and first.gap > 0.001
    assert value * (1 - first.gap) <= best + 1e-6 <= value + 2e-6
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert solved(20, monkeypatch) == (first, value)
    finally:
        for other in busy:
            other.kill()
            other.wait()


def test_a_program_that_is_stopped_before_it_has_a_solution_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_MOST_CHECKS", 0)
    draw = random.Random(0)
    problem = pulp.LpProblem("split", pulp.LpMinimize)  # has a solution, which is found by search alone
    chosen = [pulp.LpVariable(f"x{i}", cat="Binary") for i in range(40)]
    solution = [draw.randint(0, 1) for _ in chosen]
    problem += pulp.lpSum(chosen)
    for _ in range(5):
        sizes = [draw.randint(1, 99) for _ in chosen]
        problem += pulp.lpSum(size * x for size, x in zip(sizes, chosen, strict=True)) == sum(
            size * x for size, x in zip(sizes, solution, strict=True)
        )
    outcome = solve(problem, gap=0.0)
    assert (outcome.found, outcome.infeasible) == (False, False)


@pytest.mark.parametrize(("below", "found"), [(900.0, True), (861.5, True), (800.0, False), (1.0, False)])
def test_an_objective_below_a_limit_is_found_or_excluded(
    below: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, best = solved(10**6, monkeypatch)
    assert best == pytest.approx(861.0)
    outcome = solve(hard_program(), gap=0.0, below=below)
    assert (outcome.found, outcome.infeasible) == (found, not found)
    assert outcome.bound == pytest.approx(best if found else below)


def test_where_the_solver_gives_up_nothing_is_taken_as_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def gave_up(*_: object, **__: object) -> Outcome:
        return Outcome(found=False, infeasible=False, gap=math.inf, bound=0.0)

    instance = make_instance(Setting(chain=chain(3), hardware=HARDWARE, budgets=BUDGETS, slices=1, clip=False))
    monkeypatch.setattr("planner.ilp.program.solve", gave_up)
    assert solve_oilp(instance, gap=0.01) is None
    with pytest.raises(SolverGaveUp):
        solve_oilp(instance, gap=0.01, below_s=1.0)

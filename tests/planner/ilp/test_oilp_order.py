"""What no solution of the integer program does: it is asked for one that does, and has none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.candidate.setting import Budgets, Setting
from planner.ilp.columns import Columns
from planner.ilp.instance import Instance, make_instance
from planner.ilp.program import solve_oilp
from planner.ilp.sums import Term
from planner.search.problem import Problem
from tests.support.llama import GB, RTX_3060, llama

LAYERS = 3

NEVER: dict[str, Callable[[Columns, int], Term]] = {
    "update before the gradient has come": lambda v, u: v.flow["update"].upto(u) - v.flow["send_X"].upto(u),
    "update in the turn that makes the gradient": lambda v, u: (
        v.flow["update"].upto(u) - v.flow["send_X"].upto(u) + v.own["send_X"][v.p.blocks - 1 - u]
    ),
    "fetch before the update": lambda v, u: v.flow["fetch_X"].upto(u) - v.flow["update"].upto(u),
    "fetch of a weight that is not sent yet": lambda v, u: v.flow["fetch_N"].upto(u) - v.flow["send_N"].upto(u - 1),
    "fetch for backward of a weight that is on its way to the host": lambda v, u: (
        v.flow["fetch_E"].upto(u) - v.dropped(u - 1) - v.flow["send_K"].upto(u - 1)
    ),
}
"""What never happens -> by how many bytes it would, at a position or stage."""


@pytest.fixture(scope="module")
def instance() -> Instance:
    chain = llama(LAYERS)
    machine = {"chain": chain, "hardware": RTX_3060, "slices": 1, "clip": False}
    least = Problem(gpu_budget_bytes=0, cpu_budget_bytes=100 * GB, **machine).least().gpu_bytes
    return make_instance(Setting(budgets=Budgets(gpu_bytes=int(1.2 * least), cpu_bytes=100 * GB), **machine))


def test_there_is_a_solution(instance: Instance) -> None:
    assert solve_oilp(instance, gap=1e-2) is not None


@pytest.mark.parametrize("place", range(LAYERS + 2))
@pytest.mark.parametrize("what", NEVER)
def test_no_solution_has_it(instance: Instance, what: str, place: int) -> None:
    much = max(instance.weights) / 100
    assert solve_oilp(instance, gap=1e-2, more=lambda v: v.rows.at_most("much", much, NEVER[what](v, place))) is None

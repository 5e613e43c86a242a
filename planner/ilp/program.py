"""Solves the integer program of the papers (O-ILP), summed over weights: how many bytes are where and when, with a
number of variables that grows linearly with the number of blocks.

The printed program (thesis 4.1-4.23) has a variable per weight and stage. Its memory rows and link rows depend only on
sums over weights, and the gaps between the uses of weights are nested. So this program has totals per block and sums
per stage, and Hall rows (after Hall's theorem) guarantee that the sums can be handed out to tensors by earliest
deadline (`planner.search.place_transfers`). Beyond the thesis it has gradient bytes, each option's own peak, slices,
the frame, pinned and tied tensors, both directions of the link, host-memory bandwidth, clipping, and launching as total
work of a step instead of a constant under every stage.

Symbols
    L, T, m     blocks, stages 2L - 1 (head and loss are one stage), slices (micro-batches) of a round
    i, s        block; stage 0 … T-1 as in `stage_order`: the forward of i is stage i, its backward stage T-1-i
    u           position after backward: u = 0 is the head's stage L-1, and so on around the cycle
    g, f        positions of a block's backward, L-1-i, and of its next forward, L+i
    v           position after forward: the stage itself
    x[≤i]       sum of x over blocks 0 … i; x[≥i] over blocks i … L-1
    q[≤u]       sum of a flow q over positions 0 … u; q[a…b] over positions a … b
    w, z, y     bytes of a block that may leave: trainable weights, frozen weights, states
    Comp        option of a block, binary                                            thesis Comp
    Time        duration of a stage; in rounds, of the one with the updates          Time
    RoundTime   duration of a stage in the other rounds
    X           trainable weight updated on the CPU, away after backward             X_w |w|
    N           trainable weight updated on the device, away after backward
    Z, R        frozen weight that leaves at all; the part of Z away after backward
    E           weight away after forward whose copy on the host is current by then (part of X, N and Z)
    D, K        weight away after forward only; its copy is sent to the host before (D) or after (K) the forward's end
    Y           states that leave the device and come back for each update
    V           part of X whose states are on disk (`planner.ilp.stored_rows`); updV: its updates
    S           activations that a block's option keeps on the device
    send_*      copies to the host; update: CPU updates; fetch_*: copies to the device; per position   Ofl, Opt, Prf
    own_*       the part of a send or fetch that belongs to the running block: it overlaps nothing (thesis L_t)

Sizes and times are in the units of `planner.ilp.instance`. Solver variables never leave this folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pulp

from planner.ilp.columns import FETCHES, SENDS, Columns
from planner.ilp.instance import Instance
from planner.ilp.rows import add_rows
from planner.ilp.solver import Outcome, SolverGaveUp, solve
from planner.ilp.stored_rows import price_of_writing
from planner.ilp.sums import Rows, Term

_EXCESS_PRICE = 10.0  # times the transfer of a byte: exceeding the budget costs more than waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """How many bytes of each block get which placement; `of[kind]` is a list over blocks.

    Kinds, as in the module's legend: "X", "N", "R", "E", "D", "K" of weights, "Y" of states. "V" (states on disk) and
    "U" (states on disk that are updated a step after their weight) are there only if the problem allows them.
    """

    of: dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The solver's result. `options`: index of the chosen option per block. `flows[name][position]`: bytes moved at
    each position, by the names of the module's legend. `step_s`: seconds. `gap`: the solver's own (0.01 = 1%).

    `states_waiting_bytes`: states that wait to be sent to the host when position 0 begins; `states_back_bytes`: those
    that have come back by then (see `planner.search.place_transfers`). `host_left_bytes`: host memory that the solution
    does not use.
    """

    options: tuple[int, ...]
    totals: Totals
    flows: dict[str, list[float]]
    states_waiting_bytes: float
    states_back_bytes: float
    host_left_bytes: float
    step_s: float
    gap: float


def build(p: Instance) -> Columns:
    """The variables of the problem, with all constraint rows added but no objective."""
    v = Columns(Rows("oilp"), p)
    add_rows(v)
    return v


def solve_oilp(
    p: Instance,
    *,
    gap: float,
    options: tuple[int, ...] | None = None,
    totals: Totals | None = None,
    more: Callable[[Columns], object] | None = None,
    below_s: float = math.inf,
) -> Solution | None:
    """The solution with the shortest step of this instance, to within `gap` (0.01 = 1%); None if there is none, or the
    solver found none. `more`: a function that adds rows to the program. `below_s`: only a step of fewer seconds is
    looked for; then None is a proof that there is none, and SolverGaveUp is raised if there is neither.

    With `options` and `totals` given, only the flows remain to be decided. Among the flows of the shortest step, those
    are taken that send and update early and fetch late. Stages in which whole tensors do not fit exceed the budget by
    as little as possible: their tensors must come or leave in other stages than the flows say
    (`planner.search.repair`).
    """
    v = build(p)
    if more is not None:
        more(v)
    total_time = v.step_time()
    if options is not None:
        for i, chosen in enumerate(options):
            for c, x in zip(p.choices[i], v.comp[i], strict=True):
                x.cat, x.lowBound, x.upBound = "Continuous", float(c.index == chosen), float(c.index == chosen)
    if totals is not None:
        for kind, amounts in totals.of.items():
            for x, amount in zip(v.total[kind], amounts, strict=True):
                # Whole tensors may sum to a rounding error more than the block.
                fixed = amount / p.unit_bytes if x.upBound is None else min(amount / p.unit_bytes, x.upBound)
                x.lowBound = x.upBound = fixed
        for excess in v.excess:
            excess.upBound = None
        total_time += _regular(v) + _EXCESS_PRICE / p.h2d * pulp.lpSum(v.excess)
    v.rows.problem.setObjective(total_time + price_of_writing(v))
    outcome = solve(v.rows.problem, gap=gap, below=below_s / p.unit_s)
    if not outcome.found and not outcome.infeasible and below_s < math.inf:
        raise SolverGaveUp(f"no step below {below_s} s was found, and none was excluded")
    return solution_of(v, outcome) if outcome.found else None


def _regular(v: Columns) -> Term:
    """A small term of the objective that makes sending and updating late, and fetching early, cost something."""
    p = v.p
    price = 1e-4 / (p.stages * max(1e-9, sum(p.weights) + sum(p.frozen)))
    late = [v.flow[name].upto(u) for name in (*SENDS, "update", "send_K") for u in range(p.stages)]
    early = [v.flow[name].upto(u) for name in (*FETCHES, "fetch_E") for u in range(p.stages)]
    return price * (pulp.lpSum(early) - pulp.lpSum(late))


def solution_of(v: Columns, outcome: Outcome) -> Solution:
    p = v.p

    def bytes_of(variables: list[pulp.LpVariable]) -> list[float]:
        return [max(0.0, x.value() or 0.0) * p.unit_bytes for x in variables]

    flows = {name: bytes_of(flow.at) for name, flow in v.flow.items()}
    flows |= {"send_Y": bytes_of(v.send_Y), "fetch_Y": bytes_of(v.fetch_Y)}
    options = tuple(
        max(zip(p.choices[i], v.comp[i], strict=True), key=lambda pair: pair[1].value() or 0.0)[0].index
        for i in range(p.blocks)
    )
    return Solution(
        options=options,
        totals=Totals(of={kind: bytes_of(of) for kind, of in v.total.items()}),
        flows=flows,
        states_waiting_bytes=bytes_of(v.waiting[-1:])[0],
        states_back_bytes=bytes_of(v.back[-1:])[0],
        host_left_bytes=max(0.0, v.host_left.value()) * p.unit_bytes,
        step_s=(v.step_time().value() or 0.0) * p.unit_s,
        gap=outcome.gap,
    )

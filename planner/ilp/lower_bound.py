"""Computes a lower bound on the time of a step under any schedule, from each resource's total work and the memory at
two instants.

Whatever the order of operations, three things hold in a step. Every queue does all its work. At the head the saved
activations of all blocks are on the device at once. At block 0's backward all weights are there that do not leave after
their own backward. The bound is one linear program over classes of identical blocks, with their options relaxed to
fractions. It is valid for the asynchronous program, not only for the stages of `planner.ilp.program`.

Symbols are those of that module's legend, but D stands for D and K together. New here are A, the part of X that is
updated before the gradient norm is known, and S and V, the states of X on the host and on disk. With clipping there is
a window: updates that wait for the norm are done between the end of one step's backward and the head's run in the next
step, because every weight has been read by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pulp

from planner.candidate.setting import Setting
from planner.ilp.columns import limits_of
from planner.ilp.instance import Instance, Spread, make_instance
from planner.ilp.solver import solve
from planner.ilp.sums import Rows, Term
from planner.machine.traffic import AHEAD_TRAFFIC_BYTES, CLIPPED_SHARE, UPDATE_TRAFFIC_BYTES
from planner.schedule.operations import ring_at_turn

_AHEAD = AHEAD_TRAFFIC_BYTES / UPDATE_TRAFFIC_BYTES  # work of an update ahead of the norm, in updates that wait
_REPLAY = CLIPPED_SHARE * _AHEAD


@dataclass(slots=True)
class _Class:
    """Identical blocks, and their totals as variables."""

    blocks: list[int]
    total: dict[str, Term]
    comp: list[Term]


def lower_bound_s(setting: Setting) -> float:
    """A lower bound in seconds on the time of a step, for any schedule whose rounds are all alike. 0 if the solver
    finds no bound; infinity if it proves that there is no schedule."""
    p = make_instance(setting)
    rows = Rows("bound")
    time = rows.variable("Time")
    classes = _classes(rows, p)
    between = rows.variable("G", sum(p.gradients) if p.rounds > 1 else 0.0)  # gradients that leave between rounds
    _work_takes_time(rows, p, classes, between, time)
    _memory_fits_at_the_turns(rows, p, classes, between)
    rows.problem.setObjective(time)
    outcome = solve(rows.problem, gap=0.0)
    if outcome.infeasible:
        return math.inf
    return max(0.0, outcome.bound) * p.unit_s if outcome.found else 0.0


def _classes(rows: Rows, p: Instance) -> list[_Class]:
    limits = limits_of(p)
    groups: dict[object, list[int]] = {}
    for i in range(p.blocks):
        alone = i if i in (0, p.blocks - 1) else -1
        choices = tuple((c.index, c.forward, c.backward, c.kept, c.offloaded, c.stored) for c in p.choices[i])
        stored = (p.stored.may_states[i], p.stored.must_states[i]) if p.stored else ()
        on_disk = (p.on_disk[i], stored)
        sizes = (p.weights[i], p.wholly_on_disk[i], p.frozen[i], on_disk, p.states[i], p.gpu_work[i])
        work = (p.gpu_spread[i], p.cpu_spread[i])
        spreads = (p.gradient_spread[i], p.host_gradient_spread[i], p.parameter_spread[i], p.state_spread[i], work)
        groups.setdefault((alone, sizes, spreads, p.ahead_spread[i], choices), []).append(i)
    classes = []
    for number, blocks in enumerate(groups.values()):
        first, count = blocks[0], len(blocks)

        def variable(kind: str, number: int = number, first: int = first, count: int = count) -> Term:
            limit = limits["D"][first] + limits["K"][first] if kind == "D" else limits[kind][first]
            return rows.variable(f"{kind}_{number}", count * limit)

        total = {kind: variable(kind) for kind in ("X", "N", "R", "E", "D", "Y")}
        total["Z"] = rows.variable(f"Z_{number}", count * p.frozen[first])
        total["H"] = rows.variable(f"H_{number}")  # part of Z on the host: weights on disk may be the first to leave
        rows.at_most(f"host_{number}", total["Z"] - count * p.on_disk[first] * p.frozen[first], total["H"])
        wholly = count * p.wholly_on_disk[first]
        total["C"] = rows.variable(f"C_{number}")  # part of X with working copies on the host
        total["P"] = rows.variable(f"P_{number}", wholly)  # part of X without
        rows.equal(f"copies_{number}", total["X"], total["C"] + total["P"])
        rows.at_most(f"copies_on_host_{number}", total["C"], count * p.weights[first] - wholly)
        total |= _states_of_cpu_updates(rows, p, number, first, count, total["X"])
        total["A"] = rows.variable(f"A_{number}", count * limits["X"][first] if p.clip else 0.0)
        comp = [rows.variable(f"Comp_{number}_{c.index}") for c in p.choices[first]]
        weights, states = count * p.weights[first], count * p.states[first]
        rows.equal(f"options_{number}", pulp.lpSum(comp), count)
        rows.at_most(f"weights_{number}", total["X"] + total["N"] + total["D"], weights)
        rows.at_most(f"ahead_{number}", total["A"], total["X"])
        rows.at_most(f"frozen_{number}", total["R"], total["Z"])
        rows.at_most(f"current_{number}", total["E"], total["X"] + total["N"] + total["Z"])
        rows.at_most(f"states_{number}", total["Y"] + p.state_spread[first].least * total["X"], states)
        classes.append(_Class(blocks, total, comp))
    return classes


def _states_of_cpu_updates(
    rows: Rows, p: Instance, number: int, first: int, count: int, updated: Term
) -> dict[str, Term]:
    """The variables S, states on the host, and V, states read from disk and written again, of the weights that the CPU
    updates. States of the weights that it does not update may be of either kind."""
    states = p.state_spread[first].least * updated
    if p.stored is None or not p.stored.may_states[first]:
        return {"S": states, "V": 0}
    parts: dict[str, Term] = {kind: rows.variable(f"{kind}_{number}") for kind in "SV"}
    everything = p.state_ratio[first] * p.weights[first]
    rows.at_most(f"states_on_host_{number}", states - count * p.stored.may_states[first], parts["S"])
    rows.at_most(f"states_on_disk_{number}", states - count * (everything - p.stored.must_states[first]), parts["V"])
    rows.at_most(f"states_somewhere_{number}", states, parts["S"] + parts["V"])
    return parts


def _chosen(p: Instance, c: _Class, figure: str) -> Term:
    return pulp.lpSum(getattr(o, figure) * x for o, x in zip(p.choices[c.blocks[0]], c.comp, strict=True))


def _work_takes_time(rows: Rows, p: Instance, classes: list[_Class], between: Term, time: Term) -> None:
    def on_cpu(spreads: list[Spread], which: str, kind: str = "X") -> Term:
        return pulp.lpSum(getattr(spreads[c.blocks[0]], which) * c.total[kind] for c in classes)

    def work(spreads: list[Spread]) -> tuple[Term, Term]:
        """The expressions for the work of the updates that wait for the gradient norm, and for that of all updates."""
        ahead = on_cpu(spreads, "least", "A")
        waiting = on_cpu(spreads, "least") - ahead + _REPLAY * ahead
        return waiting, waiting + _AHEAD * ahead

    waiting, updated = work(p.cpu_spread)
    _, parameters = work(p.parameter_spread)
    updated_there = pulp.lpSum(c.total["N"] + c.total["D"] for c in classes)  # it changes, and is copied, once a step
    states = pulp.lpSum(c.total["Y"] for c in classes)
    offloaded = pulp.lpSum(_chosen(p, c, "offloaded") for c in classes)
    fetched = pulp.lpSum(c.total["X"] + c.total["R"] + c.total["E"] for c in classes)
    gradients = on_cpu(p.gradient_spread, "least")
    gradients_between = (p.rounds - 1) * between
    d2h = updated_there + states + p.rounds * offloaded + gradients + gradients_between
    h2d = p.rounds * (updated_there + offloaded + fetched) + states + gradients_between
    compute = p.rounds * pulp.lpSum(_chosen(p, c, "forward") + _chosen(p, c, "backward") for c in classes)
    updates = (1 / p.gpu_update) * (sum(p.gpu_work) - on_cpu(p.gpu_spread, "most"))
    alone = compute
    if p.shared_compute:
        compute = compute + p.shared_compute * ((1 / p.h2d) * h2d + (1 / p.d2h) * d2h + (1 / p.cpu_update) * updated)
    rows.at_most("compute", compute + sum(p.stage_update) + updates, time)
    rows.at_most("compute_alone", compute + sum(p.stage_update), time)
    if p.clip:
        of_head = p.blocks - 1
        before = pulp.lpSum(_chosen(p, c, "forward") for c in classes if of_head not in c.blocks)
        rows.at_most("window", alone - before + (1 / p.cpu_update) * waiting, time)
    rows.at_most("h2d", h2d, p.h2d * time)
    rows.at_most("d2h", d2h, p.d2h * time)
    rows.at_most("cpu", updated, p.cpu_update * time)
    # Of a weight wholly on disk, a gradient in each round and a working copy are written and read. Whether the copy is
    # read once more depends on the plan.
    through_disk = pulp.lpSum(c.total["V"] + (p.rounds + 1) * c.total["P"] for c in classes)
    if p.stores_activations:
        written = rows.variable("W")
        stay = ring_at_turn(p.slices) * max(choice.slot for choices in p.choices for choice in choices)
        rows.at_most("written_activations", pulp.lpSum(_chosen(p, c, "stored") for c in classes) - stay, written)
        through_disk = through_disk + p.rounds * written
    traffic = h2d + d2h + UPDATE_TRAFFIC_BYTES * parameters + 2 * through_disk
    rows.at_most("host", traffic, p.host * time)
    if p.stored or p.stores_activations:
        rows.at_most("disk", through_disk, p.disk_both * time)
        if p.disk_sustained:
            rows.at_most("disk_sustained", through_disk, p.disk_sustained * time)
    rows.at_most("launch", p.rounds * p.launch, time)
    host = [c.total["C"] + c.total["H"] for c in classes]
    beside = on_cpu(p.host_gradient_spread, "least") + pulp.lpSum(c.total["S"] for c in classes)
    hosted = pulp.lpSum(_chosen(p, c, "hosted") for c in classes)
    copies = updated_there + states + hosted + pulp.lpSum(host) + beside
    rows.at_most("cpu_memory", copies + on_cpu(p.ahead_spread, "least", "A"), p.cpu_budget - p.ring)


def _memory_fits_at_the_turns(rows: Rows, p: Instance, classes: list[_Class], between: Term) -> None:
    """Add the memory rows of two instants: at the head all activations are on the device; at block 0's backward, all
    weights that stay after their own.

    standing + moment + weights + states + kept or - away + gradients ≤ gpu_budget, at stages L-1 and T-1. Both have the
    gradients that stay between rounds, without counting those of the running block twice.
    """
    of_block = {i: c for c in classes for i in c.blocks}
    weights = sum(p.weights) + sum(p.frozen)
    states = sum(p.states) - pulp.lpSum(p.state_spread[c.blocks[0]].most * c.total["X"] + c.total["Y"] for c in classes)
    kept = pulp.lpSum(_chosen(p, c, "kept") for c in classes if c.blocks[0] != p.blocks - 1)
    turns = {
        p.blocks - 1: kept - pulp.lpSum(c.total["E"] + c.total["D"] for c in classes),
        p.stages - 1: -pulp.lpSum(c.total["X"] + c.total["N"] + c.total["R"] for c in classes if 0 not in c.blocks),
    }
    for number, moment in enumerate(p.moments):
        if moment.stage not in turns or moment.update:
            continue
        # Options of a block within a class of several are not told apart: leave their share out.
        option_part = pulp.lpSum(
            moment.bytes_of.get((i, o.index), 0) / p.unit_bytes * x
            for i in {i for i, _ in moment.bytes_of}
            if len(of_block[i].blocks) == 1
            for o, x in zip(p.choices[i], of_block[i].comp, strict=True)
        )
        used = p.stage_standing[moment.stage] + moment.fixed_bytes / p.unit_bytes + option_part + weights + states
        if p.rounds > 1:
            used = used + sum(p.gradients) - p.gradients[p.stages - 1 - moment.stage] - between
        rows.at_most(f"gpu_memory_{number}", used + turns[moment.stage], p.gpu_budget)

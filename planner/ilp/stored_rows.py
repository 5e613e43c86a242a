"""The rows of optimizer states on disk: of what the CPU updates, a part has its states there.

    V           of X, weight whose states are on disk
    updV        its updates; each reads its states and writes them again

Other symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

import pulp

from planner.ilp.columns import Columns
from planner.ilp.stored_activations import written_activations
from planner.ilp.sums import Term

_PRICE = 3e-3  # of the time that reading and writing a byte takes: what gains less is not written
_ACTIVATIONS_PRICE = 0.05  # 51 GB a step in place of 34 made one 0.9% shorter


def stored_states_follow_their_gradients(v: Columns) -> None:
    """What has its states on disk is updated after its own backward and before its own forward, and so is the rest: the
    Hall rows of X for each of the two."""
    p, update, stored = v.p, v.flow["update"], v.flow["updV"]
    assert p.stored is not None
    for i in range(p.blocks):
        v.rows.at_most(f"stored_part_b{i}", v.total["V"][i], v.total["X"][i])
        here = p.weights[i] - p.stored.must[i]
        v.rows.at_most(f"stored_must_b{i}", v.total["X"][i] - v.total["V"][i], here)
    for u in range(p.stages):
        v.rows.at_most(f"stored_update_u{u}", stored.moved(u), update.moved(u))
        v.rows.at_most(f"stored_released_u{u}", stored.upto(u), v.released("V", u))
        others = v.released("X", u) - v.released("V", u)
        v.rows.at_most(f"others_released_u{u}", update.upto(u) - stored.upto(u), others)
    v.rows.at_most("own_stored_of_b0", v.own_stored, v.total["V"][0])
    v.rows.at_most("own_stored_at_b0", v.own_stored, stored.moved(p.blocks))
    v.rows.at_most("own_stored_is_own", v.own_stored, v.own_update)
    for i in range(p.blocks):
        g, f = p.blocks - 1 - i, p.blocks + i
        own, others = (v.own_stored, v.own_update - v.own_stored) if i == 0 else (0, 0)
        in_time = stored.within(g + 1, f - 1)
        v.rows.at_most(f"stored_hall_b{i}", v.sum["V"].upto(i), own + in_time)
        rest = v.sum["X"].upto(i) - v.sum["V"].upto(i)
        v.rows.at_most(f"others_hall_b{i}", rest, others + update.within(g + 1, f - 1) - in_time)
    v.rows.equal("stored_all", stored.upto(p.stages - 1), v.sum["V"].all())


def room_on_disk(v: Columns) -> None:
    """There is room for all states together, where it is not decided yet which are there, and for activations beside
    them."""
    p = v.p
    states = p.stored.ratio * v.sum["V"].all() if p.stored else 0
    if p.stored and p.stored.room is not None:
        v.rows.at_most("disk_room", states, p.stored.room)
    if p.stores_activations:
        v.rows.at_most("disk_room_beside_states", p.rounds * written_activations(v), p.disk_room - states)


def large_tensors_are_whole(v: Columns) -> None:
    """What embedding and head do they do as a whole: where the host is full, a part of one is far from all of it."""
    p = v.p
    assert p.stored is not None
    for i in p.stored.whole:
        for kind in "XNDKVY":
            limit = v.total[kind][i].upBound
            if limit:
                chosen = v.rows.variable(f"whole_{kind}_{i}", binary=True)
                v.rows.equal(f"whole_{kind}_b{i}", v.total[kind][i], limit * chosen)


def host_spares(v: Columns, i: int) -> Term:
    """What the host has not in memory of block i, because its states are on disk."""
    p = v.p
    if p.stored is None:
        return 0
    return (p.state_ratio[i] + p.host_gradient_ratio - p.stored.beside_ratio) * v.total["V"][i]


def moved_states(v: Columns, u: int) -> Term:
    """States that the drive reads and writes again at position u."""
    return v.p.stored.ratio * v.flow["updV"].moved(u) if v.p.stored else 0


def drive_keeps_its_rate(v: Columns) -> None:
    """Over a step no more is written than the drive sustains, its fast cache being full."""
    p = v.p
    if p.disk_sustained and (p.stored or p.stores_activations):
        v.rows.at_most("disk_sustained", _written(v), p.disk_sustained * v.step_time())


def _written(v: Columns) -> Term:
    """All that a step writes."""
    p = v.p
    states = p.stored.ratio * v.sum["V"].all() if p.stored else 0
    return states + p.rounds * written_activations(v)


def price_of_writing(v: Columns) -> Term:
    """Hardly anything: without a price a drive is written to for nothing. More where it is not needed to fit: of
    activations."""
    p = v.p
    states = _PRICE * p.stored.ratio / p.disk_both * pulp.lpSum(v.total["V"]) if p.stored else 0
    return states + _ACTIVATIONS_PRICE * p.rounds / p.disk_both * written_activations(v)

"""Adds the integer program's rows for optimizer states on disk, for a part of the weights that the CPU updates.

    V           part of X whose states are on disk
    updV        its updates; each reads the states and writes them again
    U           part of V whose states are updated one step after their weight, with clipping only
    updU        part of updV: once the norm is known, the states of U are read to update the weight alone
    restU       the rest of that update: in the next step, before the next gradient comes, the states of U are read
                again, updated and written

Other symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pulp

from planner.ilp.columns import Columns
from planner.ilp.stored_activations import written_activations
from planner.ilp.sums import Term

_PRICE = 3e-3  # of the time to read and write a byte: states that gain less are not written
_ACTIVATIONS_PRICE = 0.05  # writing 51 GB a step instead of 34 made a step only 0.9% shorter


def stored_states_follow_their_gradients(v: Columns) -> None:
    """Add rows: weights with states on disk are updated after their own backward and before their next forward.

    updV[≤u] ≤ V[≥L-1-u], V[≤i] ≤ updV[g+1…f-1], and the same for X - V and update - updV; own parts for block 0. So the
    Hall rows of X hold for each of the two groups. V ≤ X, and X - V ≤ w - must.
    """
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
        not_stored = v.sum["X"].upto(i) - v.sum["V"].upto(i)
        v.rows.at_most(f"others_hall_b{i}", not_stored, others + update.within(g + 1, f - 1) - in_time)
    v.rows.equal("stored_all", stored.upto(p.stages - 1), v.sum["V"].all())


def states_trail_their_weights(v: Columns) -> None:
    """Add rows for states on disk that are updated one step after their weights: the weights before their next forward,
    the states in the next backward, before the next gradient comes.

    U ≤ V, U[≤i] ≤ updU[g+1…f-1], (V-U)[≤i] ≤ (updV-updU)[g+1…f-1], U[≥i] ≤ restU[≤g-1]; own parts for block 0. So the
    Hall rows of V hold for U and for V - U. restU is 0 from u = L on: until that backward the drive has other states to
    read and write.
    """
    p = v.p
    if "U" not in v.total:
        return
    trail, stored, rest = v.flow["updU"], v.flow["updV"], v.flow["restU"]
    for i in range(p.blocks):
        v.rows.at_most(f"trailing_part_b{i}", v.total["U"][i], v.total["V"][i])
    for u in range(p.stages):
        v.rows.at_most(f"trailing_update_u{u}", trail.moved(u), stored.moved(u))
        if u >= p.blocks:
            v.rows.equal(f"trailing_rest_u{u}", rest.moved(u), 0)
    v.rows.at_most("own_trailing_of_b0", v.own_trailing, v.total["U"][0])
    v.rows.at_most("own_trailing_at_b0", v.own_trailing, trail.moved(p.blocks))
    v.rows.at_most("own_trailing_is_own", v.own_trailing, v.own_stored)
    for i in range(p.blocks):
        g, f = p.blocks - 1 - i, p.blocks + i
        own, others = (v.own_trailing, v.own_stored - v.own_trailing) if i == 0 else (0, 0)
        in_time = trail.within(g + 1, f - 1)
        v.rows.at_most(f"trailing_hall_b{i}", v.sum["U"].upto(i), own + in_time)
        whole = v.sum["V"].upto(i) - v.sum["U"].upto(i)
        v.rows.at_most(f"whole_hall_b{i}", whole, others + stored.within(g + 1, f - 1) - in_time)
        v.rows.at_most(f"trailing_rest_b{i}", v.sum["U"].since(i), rest.upto(g - 1))
    v.rows.equal("trailing_all", trail.upto(p.stages - 1), v.sum["U"].all())
    v.rows.equal("trailing_rest_all", rest.upto(p.stages - 1), v.sum["U"].all())


def room_on_disk(v: Columns) -> None:
    """Add rows: the disk has room for all states together, if it is not decided yet which states are there, and for
    activations beside them.

    states of V ≤ room, and rounds · write_S[≤T-1] ≤ disk_room - states of V.
    """
    p = v.p
    states = (p.stored.ratio + 2 * p.stored.wholly) * v.sum["V"].all() if p.stored else 0
    if p.stored and p.stored.room is not None:
        v.rows.at_most("disk_room", states, p.stored.room)
    if p.stores_activations:
        v.rows.at_most("disk_room_beside_states", p.rounds * written_activations(v), p.disk_room - states)


def large_tensors_are_whole(v: Columns) -> None:
    """Add total[i] ∈ {0, limit[i]} for X, N, D, K, V, Y, U of each block i that is one tensor.

    Such tensors, embedding and head, are placed as wholes: on a full host, room for a part of one is far from room for
    all of it.
    """
    p = v.p
    assert p.stored is not None
    for i in p.stored.whole:
        for kind in "XNDKVYU":
            limit = v.total[kind][i].upBound if kind in v.total else 0
            if limit:
                chosen = v.rows.variable(f"whole_{kind}_{i}", binary=True)
                v.rows.equal(f"whole_{kind}_b{i}", v.total[kind][i], limit * chosen)


def host_spares(v: Columns, i: int) -> Term:
    """The expression for the bytes of host memory that block `i` saves because its states are on disk."""
    p = v.p
    if p.stored is None:
        return 0
    spared = (p.state_ratio[i] + p.host_gradient_ratio - p.stored.beside_ratio) * v.total["V"][i]
    return spared - p.stored.trailing_ratio * v.total["U"][i] if "U" in v.total else spared


@dataclass(frozen=True, slots=True)
class Passes:
    """Expressions for the bytes of weight whose optimizer states the drive moves at one position (stage). `whole`:
    states are read and written; `read`: states are only read, to update the weight alone; `again`: the part of `whole`
    that completes such updates of the step before."""

    whole: Term = 0
    read: Term = 0
    again: Term = 0

    @classmethod
    def at(cls, v: Columns, u: int) -> Passes:
        """What the drive moves at position `u`, counted in stages from the head's."""
        if not v.p.stored:
            return cls()
        every = v.flow["updV"].moved(u)
        if "U" not in v.total:
            return cls(every)
        read, again = v.flow["updU"].moved(u), v.flow["restU"].moved(u)
        return cls(every - read + again, read, again)

    def drive_bytes(self, v: Columns) -> Term:
        """The expression for the drive's work, as the number of bytes that would take as long to read."""
        p = v.p
        if not p.stored:
            return 0
        passing = p.stored.wholly * (1 + 2 * p.disk / p.disk_write)  # the gradient there and back, the weight there
        return p.stored.ratio * ((p.disk / p.disk_both) * self.whole + self.read) + passing * self.whole

    def host_bytes(self, v: Columns) -> Term:
        """The expression for the bytes that these reads from disk and writes to disk move through the host's memory."""
        stored = v.p.stored
        return stored.ratio * (2 * self.whole + self.read) + 3 * stored.wholly * self.whole if stored else 0


def own_drive_time(v: Columns) -> Term:
    """The expression for the time that block 0's forward waits for the drive: its update comes directly before that
    forward, and overlaps nothing."""
    p = v.p
    assert p.stored is not None
    spared = (1 / p.disk_both - 1 / p.disk) * v.own_trailing if "U" in v.total else 0
    return p.stored.ratio * ((1 / p.disk_both) * v.own_stored - spared)


def gradients_between_rounds(v: Columns, u: int) -> Term:
    """The expression for the gradient bytes that a round without updates writes to disk at position `u`, to be read
    again for the next round: those of weights that are entirely on disk, a share of the gradients sent there."""
    p = v.p
    share = sum(p.wholly_on_disk) / max(1e-12, sum(p.weights))
    return share * p.gradient_ratio * v.flow["send_X"].moved(u)


def drive_keeps_its_rate(v: Columns) -> None:
    """Add a row: a step writes no more than the drive sustains for hours, with its fast cache full.

    written bytes of a step ≤ disk_sustained · step time.
    """
    p = v.p
    if p.disk_sustained and (p.stored or p.stores_activations):
        v.rows.at_most("disk_sustained", _written(v), p.disk_sustained * v.step_time())


def _written(v: Columns) -> Term:
    """All bytes that a step writes to disk."""
    p = v.p
    weights = p.rounds + 1  # a gradient in each round, and the weight that is made of them
    states = (p.stored.ratio + weights * p.stored.wholly) * v.sum["V"].all() if p.stored else 0
    return states + p.rounds * written_activations(v)


def price_of_writing(v: Columns) -> Term:
    """A small term of the objective for each byte written to a drive; without it, solutions would write for nothing. It
    is higher for activations, which need not be written for a plan to fit."""
    p = v.p
    states = _PRICE * p.stored.ratio / p.disk_both * pulp.lpSum(v.total["V"]) if p.stored else 0
    return states + _ACTIVATIONS_PRICE * p.rounds / p.disk_both * written_activations(v)

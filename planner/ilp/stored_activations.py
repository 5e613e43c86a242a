"""The rows of activations on disk: what a block's option sends there goes through a ring of host memory, and comes back
through it. What is in the ring when backward begins may stay there.

    write_S     what of them is written in a stage, from the ring
    read_S      what is read, into it
    ring_S      the host memory of the ring
    stay_S      what stays in it

Other symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

from planner.ilp.columns import Columns
from planner.ilp.sums import Term
from planner.schedule.operations import ACTIVATION_SLOTS, ring_at_turn


def stored_activations_pass_through_their_ring(v: Columns) -> None:
    """What has left the device, and is not written yet, is in the ring; so is what was read before it is fetched. Its
    slots are as large as the largest turn's activations."""
    p = v.p
    write, read = v.flow["write_S"], v.flow["read_S"]
    left: Term = 0
    came: Term = 0
    for i in range(p.blocks):
        v.rows.at_most(f"ring_S_b{i}", ACTIVATION_SLOTS * v.choice(i, "slot"), v.passing)
    v.rows.at_most("stays_S", v.staying, ring_at_turn(p.slices) / ACTIVATION_SLOTS * v.passing)
    for s in range(p.stages):
        left, came = left + leaving(v, s, "stored"), came + coming(v, s, "stored")
        if s < p.blocks:
            v.rows.at_most(f"written_S_s{s}", write.upto(s), left)
            v.rows.at_most(f"to_write_S_s{s}", left - write.upto(s), v.passing)
        else:
            v.rows.equal(f"no_write_S_s{s}", write.moved(s), 0)
        if s >= p.blocks - 1:
            v.rows.at_most(f"read_S_s{s}", came, v.staying + read.upto(s))
            v.rows.at_most(f"to_fetch_S_s{s}", v.staying + read.upto(s) - came, v.passing)
        else:
            v.rows.equal(f"no_read_S_s{s}", read.moved(s), 0)
    v.rows.equal("written_S", write.upto(p.stages - 1), left - v.staying)
    v.rows.equal("read_S", read.upto(p.stages - 1), came - v.staying)


def leaving(v: Columns, s: int, what: str = "offloaded") -> Term:
    """Activations on their way to the host in stage s: a slice's leave in the turn after its own."""
    p = v.p
    own = v.choice(s, what) if s < p.blocks - 1 else 0
    below = v.choice(s - 1, what) if 0 < s < p.blocks else 0
    return (1 - 1 / p.slices) * own + (1 / p.slices) * below


def coming(v: Columns, s: int, what: str = "offloaded") -> Term:
    """Those that come back in stage s: a slice's in the turn before its own. See `awaited`."""
    p = v.p
    if s < p.blocks - 1:
        return 0
    i = p.stages - 1 - s
    own = v.choice(i, what) if i < p.blocks - 1 else 0
    following = v.choice(i - 1, what) if i else 0
    if p.slices == 1 and i == p.blocks - 1:
        return 0
    return (1 - 1 / p.slices) * own + (1 / p.slices) * following + awaited(v, s, what)


def awaited(v: Columns, s: int, what: str = "offloaded") -> Term:
    """A single slice of the last layer leaves in the turn before its backward: it comes in its own, awaited."""
    p = v.p
    return v.choice(p.blocks - 2, what) if p.slices == 1 and s == p.blocks else 0


def written_activations(v: Columns) -> Term:
    """What of them a round writes."""
    return v.flow["write_S"].upto(v.p.stages - 1) if v.p.stores_activations else 0


def moved_activations(v: Columns, s: int) -> tuple[Term, Term]:
    """Bytes that stage s reads from disk, and those that it writes there."""
    if not v.p.stores_activations:
        return 0, 0
    return v.flow["read_S"].moved(s), v.flow["write_S"].moved(s)

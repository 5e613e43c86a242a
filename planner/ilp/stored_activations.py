"""The rows of activations on disk: they go to the disk through a ring of host memory, and come back through it.

A block's option says which activations those are. Activations that are in the ring when backward begins may stay there.

    write_S     bytes written in a stage, from the ring
    read_S      bytes read in a stage, into the ring
    ring_S      host memory of the ring
    stay_S      bytes that stay in the ring

Other symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

from planner.ilp.columns import Columns
from planner.ilp.sums import Term
from planner.schedule.operations import ACTIVATION_SLOTS, ring_at_turn


def stored_activations_pass_through_their_ring(v: Columns) -> None:
    """write_S[≤s] ≤ left[≤s] ≤ write_S[≤s] + ring_S; came[≤s] ≤ stay_S + read_S[≤s] ≤ came[≤s] + ring_S.

    Activations that have left the device and are not written yet are in the ring (s < L), and so are those that were
    read and not fetched yet (s ≥ L-1). The ring's slots are as large as the activations of the largest turn."""
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


def leaving(v: Columns, s: int, figure: str = "offloaded") -> Term:
    """Activation bytes sent to the host in stage s: a slice's activations leave in the turn after its own."""
    p = v.p
    own = v.choice(s, figure) if s < p.blocks - 1 else 0
    below = v.choice(s - 1, figure) if 0 < s < p.blocks else 0
    return (1 - 1 / p.slices) * own + (1 / p.slices) * below


def coming(v: Columns, s: int, figure: str = "offloaded") -> Term:
    """Activation bytes fetched in stage s: a slice's activations come in the turn before its own. See `awaited`."""
    p = v.p
    if s < p.blocks - 1:
        return 0
    i = p.stages - 1 - s
    own = v.choice(i, figure) if i < p.blocks - 1 else 0
    following = v.choice(i - 1, figure) if i else 0
    if p.slices == 1 and i == p.blocks - 1:
        return 0
    return (1 - 1 / p.slices) * own + (1 / p.slices) * following + awaited(v, s, figure)


def awaited(v: Columns, s: int, figure: str = "offloaded") -> Term:
    """Activation bytes that the device waits for in stage s: with a single slice, the last layer's activations leave in
    the turn just before its backward, so they come back in that backward itself."""
    p = v.p
    return v.choice(p.blocks - 2, figure) if p.slices == 1 and s == p.blocks else 0


def written_activations(v: Columns) -> Term:
    """Activation bytes that a round writes to disk."""
    return v.flow["write_S"].upto(v.p.stages - 1) if v.p.stores_activations else 0


def moved_activations(v: Columns, s: int) -> tuple[Term, Term]:
    """Bytes that stage s reads from disk, and those that it writes there."""
    if not v.p.stores_activations:
        return 0, 0
    return v.flow["read_S"].moved(s), v.flow["write_S"].moved(s)

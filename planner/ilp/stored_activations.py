"""Adds the integer program's rows for activations on disk, which pass through a ring of host memory slots in both
directions.

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
    """Add rows: activations that have left the device and are not written to disk yet (stages s < L), or were read and
    not fetched yet (s ≥ L-1), fit into the host memory of the ring.

    write_S[≤s] ≤ left[≤s] ≤ write_S[≤s] + ring_S; came[≤s] ≤ stay_S + read_S[≤s] ≤ came[≤s] + ring_S. The ring's slots
    are as large as the largest activations of one block and slice.
    """
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
    """The expression for the activation bytes sent to the host in stage `s`. A slice's activations leave while the
    block runs the next slice, those of the last slice while the next block runs. `figure`: a field of `Choice`."""
    p = v.p
    own = v.choice(s, figure) if s < p.blocks - 1 else 0
    below = v.choice(s - 1, figure) if 0 < s < p.blocks else 0
    return (1 - 1 / p.slices) * own + (1 / p.slices) * below


def coming(v: Columns, s: int, figure: str = "offloaded") -> Term:
    """The expression for the activation bytes fetched in stage `s`. A slice's activations come while the slice before
    it runs. `figure`: a field of `Choice`. See `awaited` for those that the device waits for."""
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
    """The expression for the activation bytes that the device waits for in stage `s`. With a single slice, the last
    layer's activations are still leaving just before its backward, so they come back in that backward itself."""
    p = v.p
    return v.choice(p.blocks - 2, figure) if p.slices == 1 and s == p.blocks else 0


def written_activations(v: Columns) -> Term:
    """The expression for the activation bytes that a round writes to disk."""
    return v.flow["write_S"].upto(v.p.stages - 1) if v.p.stores_activations else 0


def moved_activations(v: Columns, s: int) -> tuple[Term, Term]:
    """The expressions for the activation bytes that stage `s` reads from disk, and for those that it writes there."""
    if not v.p.stores_activations:
        return 0, 0
    return v.flow["read_S"].moved(s), v.flow["write_S"].moved(s)

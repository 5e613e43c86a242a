"""Stages as barriers, as the papers have them: rows beyond those of `planner.ilp.program`, in which an update's weight
may come back in the stage of its update.

The running sums say that as much has been updated as was sent, and the Hall rows that every block's bytes can be sent,
updated and fetched in its own gap; but the bytes sent early may be another block's. For the nested blocks 0 … i and any
position t, a byte of theirs that is not through one queue by t goes through the next one after t. With stages as
barriers a chain has three stages at least, and without these rows the optimum was up to 13% too low on irregular
chains; where an update's weight may come back in the same stage no such chain was found.

Symbols: see the legend in `planner.ilp.program`.
"""

from __future__ import annotations

from planner.ilp.columns import Columns, backward_position, forward_position


def stage_barriers(v: Columns) -> None:
    """An update's weight comes back from the stage after the update's on; block 0's, which waits for both, in that very
    stage."""
    p, update, fetch = v.p, v.flow["update"], v.flow["fetch_X"]
    for u in range(p.stages):
        at_once = v.own_update if u == p.blocks else 0
        v.rows.at_most(f"barrier_fetch_u{u}", fetch.upto(u), update.upto(u - 1) + at_once)
        v.rows.at_most(f"barrier_released_u{u}", fetch.upto(u), v.released("X", u - 2) + at_once)
    for i in range(p.blocks):
        g, f = backward_position(p, i), forward_position(p, i)
        back = v.own["fetch_X"][i] + fetch.within(g + 2, f - 1)
        v.rows.at_most(f"barrier_back_b{i}", v.sum["X"].upto(i), back)
    _updates_pass_through_their_queues(v)


def _updates_pass_through_their_queues(v: Columns) -> None:
    """(4.11)-(4.13), for blocks 0 … i at each position t of block i's gap: updated by t, or fetched after t + 1; sent
    by t, or updated after t and so fetched after t + 1.
    """
    p, send, update, fetch = v.p, v.flow["send_X"], v.flow["update"], v.flow["fetch_X"]
    own_send, own_fetch = v.own["send_X"], v.own["fetch_X"]
    for i in range(1, p.blocks):
        g, f = backward_position(p, i), forward_position(p, i)
        for t in range(g + 1, f - 1):
            fetched_later = own_fetch[i] + fetch.within(t + 2, f - 1)
            if t == p.blocks - 1:  # block 0's weight comes back in the stage of its update
                fetched_later = fetched_later + v.own_update
            v.rows.at_most(f"cut_updated_b{i}_u{t}", v.sum["X"].upto(i), update.within(g + 1, t) + fetched_later)
            # What the block of position t sends itself is updated after it.
            not_yet = own_send[p.blocks - 1 - t] if t < p.blocks else 0
            sent = own_send[i] + send.within(g + 1, t) - not_yet
            v.rows.at_most(f"cut_sent_b{i}_u{t}", v.sum["X"].upto(i), sent + fetched_later)

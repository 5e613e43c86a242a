"""Adds the constraint rows of the integer program (O-ILP): when bytes leave and must be back, and what fits into device
and host memory.

Symbols are those of the legend in `planner.ilp.program`; the rows of time are in `planner.ilp.stage_times`.
"""

from __future__ import annotations

import pulp

from planner.ilp.columns import FETCHES, Columns, backward_position, forward_position, position
from planner.ilp.stage_times import stages_last_as_long_as_their_work
from planner.ilp.stored_activations import stored_activations_pass_through_their_ring
from planner.ilp.stored_rows import (
    host_spares,
    large_tensors_are_whole,
    room_on_disk,
    states_trail_their_weights,
    stored_states_follow_their_gradients,
)
from planner.ilp.sums import Term


def add_rows(v: Columns) -> None:
    """Add all constraint rows to the problem of `v`."""
    one_option_per_block(v)
    totals_are_parts_of_blocks(v)
    weights_leave_after_their_backward(v)
    cpu_updates_follow_their_gradients(v)
    weights_are_back_for_their_forward(v)
    weights_are_back_for_their_backward(v)
    states_are_there_for_their_update(v)
    if v.p.stored:
        stored_states_follow_their_gradients(v)
        states_trail_their_weights(v)
        large_tensors_are_whole(v)
    if v.p.stores_activations:
        stored_activations_pass_through_their_ring(v)
    room_on_disk(v)
    gpu_memory_fits(v)
    gpu_memory_fits_between_steps(v)
    host_memory_fits(v)
    stages_last_as_long_as_their_work(v)


def one_option_per_block(v: Columns) -> None:
    """Add thesis rows (4.1): each block i has exactly one option, Σ_c Comp[i, c] = 1."""
    for i, chosen in enumerate(v.comp):
        v.rows.equal(f"eq4_1_option_b{i}", pulp.lpSum(chosen), 1)


def totals_are_parts_of_blocks(v: Columns) -> None:
    """Add thesis rows (4.3), (4.6): each byte of a block has one placement, and states of weights that the CPU updates
    stay on the host.

    X + N + D + K ≤ w, R ≤ Z, E ≤ X + N + Z, Y + states of X ≤ y, and X ≥ the weights without a copy on the host, in
    each block.
    """
    p, t = v.p, v.total
    for i in range(p.blocks):
        v.rows.at_most(f"eq4_3_weights_b{i}", t["X"][i] + t["N"][i] + t["D"][i] + t["K"][i], p.weights[i])
        if p.wholly_on_disk[i]:
            v.rows.at_most(f"wholly_on_disk_b{i}", p.wholly_on_disk[i], t["X"][i])
        v.rows.at_most(f"eq4_3_frozen_b{i}", t["R"][i], v.frozen_moved[i])
        v.rows.at_most(f"eq4_3_current_b{i}", t["E"][i], t["X"][i] + t["N"][i] + v.frozen_moved[i])
        v.rows.at_most(f"eq4_6_states_b{i}", t["Y"][i] + v.states_on_host(i), p.states[i])


def _own_part(v: Columns, name: str, kind: str, i: int, u: int) -> Term:
    """The part of a flow at position `u` that belongs to block `i` itself, with rows own ≤ total[i] and own ≤
    flow[u]."""
    own = v.own[name][i]
    v.rows.at_most(f"own_{name}_of_b{i}", own, v.total[kind][i])
    v.rows.at_most(f"own_{name}_at_b{i}", own, v.flow[name].moved(u))
    return own


def weights_leave_after_their_backward(v: Columns) -> None:
    """Add thesis rows (4.7), (4.12): trainable weights and gradients are sent only after they are made, and all in
    time.

    send[≤u] ≤ X[≥L-1-u], send[≤g] ≤ X[≥i+1] + own[i], X[≤i] ≤ own[i] + send[g+1…last]; the same for N and D. A gradient
    leaves between its backward and the end of block 0's backward (`last` = L-1), a weight before the stage that needs
    it (N: f-1, D: f). What the running block itself sends waits until its stage has computed.
    """
    p = v.p
    for name, kind in (("send_X", "X"), ("send_N", "N"), ("send_D", "D")):
        flow = v.flow[name]
        for u in range(p.stages):
            v.rows.at_most(f"eq4_7_{name}_u{u}", flow.upto(u), v.released(kind, u))
        for i in range(p.blocks):
            g = backward_position(p, i)
            own = _own_part(v, name, kind, i, g)
            # What is sent at g beyond what was released before g must be i's own.
            v.rows.at_most(f"eq4_7_own_{name}_b{i}", flow.upto(g) - v.released(kind, g - 1), own)
            last = {"X": p.blocks - 1, "N": forward_position(p, i) - 1, "D": forward_position(p, i)}[kind]
            v.rows.at_most(f"eq4_7_{name}_b{i}", v.sum[kind].upto(i), own + flow.within(g + 1, min(last, p.stages - 1)))


def cpu_updates_follow_their_gradients(v: Columns) -> None:
    """Add thesis rows (4.4), (4.12), (4.13): the CPU updates a weight after its gradient has come, with clipping after
    block 0's backward, and the weight is fetched after its update.

    update[≤u] ≤ send_X[≤u], fetch_X[≤u] ≤ update[≤u], fetch_X[≤u] ≤ X[≥L-u], X[≤i] ≤ update[g+1…f-1]. Block 0's next
    forward follows its backward at once, so it waits for gradient, update (own_update) and weight, one after another.
    """
    p, update, send = v.p, v.flow["update"], v.flow["send_X"]
    for u in range(p.stages):
        v.rows.at_most(f"eq4_12_update_u{u}", update.upto(u), send.upto(u))
        v.rows.at_most(f"eq4_13_fetch_u{u}", v.flow["fetch_X"].upto(u), update.upto(u))
        v.rows.at_most(f"eq4_13_released_u{u}", v.flow["fetch_X"].upto(u), v.released("X", u - 1))
        if p.clip and u < p.blocks:
            v.rows.equal(f"clip_waits_for_the_norm_u{u}", update.moved(u), 0)
    for i in range(p.blocks):
        g, f = backward_position(p, i), forward_position(p, i)
        v.rows.at_most(f"eq4_12_own_b{i}", update.upto(g), send.upto(g) - v.own["send_X"][i])
        own = v.own_update if i == 0 else 0
        v.rows.at_most(f"eq4_11_update_b{i}", v.sum["X"].upto(i), own + update.within(g + 1, f - 1))
    v.rows.at_most("own_update_of_b0", v.own_update, v.total["X"][0])
    v.rows.at_most("own_update_at_b0", v.own_update, update.moved(p.blocks))


def weights_are_back_for_their_forward(v: Columns) -> None:
    """Add thesis rows (4.5) for forward, (4.9), (4.11): weights that were away after backward are back by their next
    forward, the last of them in that stage itself (own).

    fetch_N[≤u] ≤ send_N[≤u-1], fetch_R[≤u] ≤ R[≥L-u], X[≤i] ≤ own[i] + fetch_X[g+1…f-1]; the last also for N and R.
    """
    p = v.p
    for u in range(p.stages + 1):
        v.rows.at_most(f"eq4_9_fetch_N_u{u}", v.flow["fetch_N"].upto(u), v.flow["send_N"].upto(u - 1))
        v.rows.at_most(f"eq4_9_fetch_R_u{u}", v.flow["fetch_R"].upto(u), v.released("R", u - 1))
    v.rows.at_most("eq4_13_fetch_last", v.flow["fetch_X"].upto(p.stages), v.flow["update"].upto(p.stages - 1))
    for name, kind in (("fetch_X", "X"), ("fetch_N", "N"), ("fetch_R", "R")):
        for i in range(p.blocks):
            g, f = backward_position(p, i), forward_position(p, i)
            own = _own_part(v, name, kind, i, f)
            v.rows.at_most(f"eq4_5_{name}_b{i}", v.sum[kind].upto(i), own + v.flow[name].within(g + 1, f - 1))
        v.rows.equal(f"eq4_5_{name}_all", v.flow[name].upto(p.stages), v.sum[kind].all())


def weights_are_back_for_their_backward(v: Columns) -> None:
    """Add thesis rows (4.5) for backward, (4.7), (4.9): weights that were away after forward are back by their
    backward.

    send_K[≤s] ≤ K[≤s-1], fetch_E[≤s] ≤ (E+D)[≤s-1] + send_K[≤s-1], (E+D+K)[≥i] ≤ own[i] + fetch_E[i+1…T-2-i]. K is sent
    in time: K[≥i] ≤ send_K[i+1…T-2-i].
    """
    p, send, fetch = v.p, v.flow["send_K"], v.flow["fetch_E"]
    for s in range(p.stages):
        v.rows.at_most(f"eq4_7_send_K_s{s}", send.upto(s), v.sum["K"].upto(s - 1))
        v.rows.at_most(f"eq4_9_fetch_E_s{s}", fetch.upto(s), v.dropped(s - 1) + send.upto(s - 1))
    for i in range(p.blocks - 1):
        g = p.stages - 1 - i
        own = v.own["fetch_E"][i]
        v.rows.at_most(f"own_fetch_E_of_b{i}", own, v.total["E"][i] + v.total["D"][i] + v.total["K"][i])
        v.rows.at_most(f"own_fetch_E_at_b{i}", own, fetch.moved(g))
        v.rows.at_most(f"eq4_7_send_K_b{i}", v.sum["K"].since(i), send.within(i + 1, g - 1))
        needed = v.sum["ED"].since(i) + v.sum["K"].since(i)
        v.rows.at_most(f"eq4_5_fetch_E_b{i}", needed, own + fetch.within(i + 1, g - 1))
    v.rows.equal("own_fetch_E_head", v.own["fetch_E"][p.blocks - 1], 0)


def states_are_there_for_their_update(v: Columns) -> None:
    """Add thesis rows (4.6), (4.8), (4.10): optimizer states that leave the device wait to leave, are away, come back,
    and wait for their update on the device, again and again.

    waiting[u] = waiting[u-1] + use - send_Y[u], back[u] = back[u-1] - use + fetch_Y[u], use ≤ back[u-1] + own. `use` is
    Y of the block updated at u, else 0, and away[u] = away[u-1] + send_Y[u-1] - fetch_Y[u], with u-1 modulo T.
    """
    p = v.p
    used = {(p.blocks - 1 if p.clip else backward_position(p, i)): i for i in ([0] if p.clip else range(p.blocks))}
    for i in range(p.blocks):
        if i not in used.values():
            v.rows.equal(f"own_send_Y_b{i}", v.own["send_Y"][i], 0)
            v.rows.equal(f"own_fetch_Y_b{i}", v.own["fetch_Y"][i], 0)
    for u in range(p.stages):
        before = (u - 1) % p.stages
        use: Term = v.total["Y"][used[u]] if u in used else 0
        v.rows.equal(f"eq4_8_waiting_u{u}", v.waiting[u], v.waiting[before] + use - v.send_Y[u])
        v.rows.equal(f"eq4_10_back_u{u}", v.back[u], v.back[before] - use + v.fetch_Y[u])
        v.rows.equal(f"eq4_8_away_u{u}", v.away[u], v.away[before] + v.send_Y[before] - v.fetch_Y[u])
        if u in used:
            i = used[u]
            v.rows.at_most(f"eq4_6_back_b{i}", use, v.back[before] + v.own["fetch_Y"][i])
            v.rows.at_most(f"eq4_6_own_fetch_b{i}", v.own["fetch_Y"][i], v.fetch_Y[u])
            v.rows.at_most(f"eq4_8_own_send_b{i}", v.send_Y[u] - v.waiting[before], v.own["send_Y"][i])
    ring = v.waiting[0] + v.back[0] + v.away[0] + v.send_Y[0]
    v.rows.equal("eq4_8_ring", ring, v.sum["Y"].all())


def gpu_memory_fits(v: Columns) -> None:
    """Add thesis rows (4.14)-(4.17): at every moment of a stage, all that is on the device fits the budget.

    Terms: what is always on the device, what the stage itself needs at the moment, the saved activations of earlier
    blocks, weights and states without those that are away then, and gradients. `excess`: bytes above the budget that a
    stage may have at a price, while the program is solved for the least budget.

    standing + moment + S[≤before] + weights - away + states - away_Y[u] + gradients ≤ gpu_budget, at each moment.
    """
    p = v.p
    weights = sum(p.weights) + sum(p.frozen)
    states = sum(p.states) - pulp.lpSum(v.states_on_host(i) for i in range(p.blocks))
    for number, moment in enumerate(p.moments):
        s, u = moment.stage, position(p, moment.stage)
        own_options = pulp.LpAffineExpression(
            {
                x: moment.bytes_of.get((i, c.index), 0) / p.unit_bytes
                for i in {i for i, _ in moment.bytes_of}
                for c, x in zip(p.choices[i], v.comp[i], strict=True)
            }
        )
        used = (
            p.stage_standing[s]
            + moment.fixed_bytes / p.unit_bytes
            + own_options
            + v.sum["S"].upto(moment.before)
            + weights
            - _weights_away(v, s, u)
            + states
            - v.away[u]
            + _gradients_left(v, s, u)
        )
        v.rows.at_most(f"eq4_17_gpu_memory_s{s}_{number}", used, p.gpu_budget + v.excess[s])


def gpu_memory_fits_between_steps(v: Columns) -> None:
    """Add a row for work between two steps (`Chain.between_gpu_bytes`), for which all leaves that ever leaves.

    standing + between + weights - X - N - D - K + frozen - moved + states - Y ≤ gpu_budget.
    """
    p, t = v.p, v.total
    if not p.between:
        return
    moved = pulp.lpSum(t[kind][i] for kind in ("X", "N", "D", "K", "Y") for i in range(p.blocks))
    states = sum(p.states) - pulp.lpSum(v.states_on_host(i) for i in range(p.blocks))
    used = p.stage_standing[0] + p.between + sum(p.weights) + sum(p.frozen) + states - moved
    v.rows.at_most("gpu_memory_between_steps", used - pulp.lpSum(v.frozen_moved), p.gpu_budget + v.excess[0])


def _weights_away(v: Columns, s: int, u: int) -> Term:
    """(4.14): weights that left by the end of the stage before, less those that come back by the end of this one."""
    flow = v.flow
    after_backward = v.released("X", u - 1) + v.released("R", u - 1) + flow["send_N"].upto(u - 1)
    back = pulp.lpSum(flow[name].upto(u) for name in FETCHES)
    after_forward = v.dropped(s - 1) + flow["send_K"].upto(s - 1) - flow["fetch_E"].upto(s)
    return after_backward - back + after_forward


def _gradients_left(v: Columns, s: int, u: int) -> Term:
    """Gradients of earlier blocks that are still on the device: not sent yet, or waiting for the norm."""
    p = v.p
    remaining: Term = p.gradient_ratio * (v.released("X", u - 1) - v.flow["send_X"].upto(u - 1))
    if p.rounds > 1:  # gradients for device updates stay between rounds; a stage's moments have its own
        remaining = remaining + sum(p.gradients) - p.gradient_ratio * v.sum["X"].all() + v.gradients_coming(s)
        if s >= p.blocks - 1:
            block = p.stages - 1 - s
            remaining = remaining - p.gradients[block] + p.gradient_ratio * v.total["X"][block]
    elif p.clip and s >= p.blocks:
        above = range(p.blocks - u, p.blocks)
        remaining = remaining + sum(p.gradients[i] for i in above) - p.gradient_ratio * v.released("X", u - 1)
    return remaining


def host_memory_fits(v: Columns) -> None:
    """Add thesis rows (4.18): all that the host holds fits its budget.

    Σ_i (X + its gradients and states + Z + N + D + K + Y + hosted activations) - parts on disk ≤ cpu_budget - ring. The
    host keeps a copy of all weights and states that ever leave the device, the gradients and states of the weights that
    the CPU updates, except states on disk, and offloaded activations. It also has ring_S, the buffers for activations
    on disk, and the scratch memory of the largest CPU update that needs any (`products`).
    """
    p, t = v.p, v.total
    used: list[Term] = []
    for i in range(p.blocks):
        used += [(1 + p.host_gradient_ratio) * t["X"][i] - p.wholly_on_disk[i]]
        used += [v.states_on_host(i), -host_spares(v, i)]
        used += [(1 - p.on_disk[i]) * v.frozen_moved[i]]
        used += [t["N"][i], t["D"][i], t["K"][i], t["Y"][i], v.choice(i, "hosted")]
    if p.stores_activations:
        used.append(v.passing)
    if p.products:
        any_matrix = v.rows.variable("AnyMatrix", binary=True)
        for i, (weights, apart) in enumerate(zip(p.weights, p.apart, strict=True)):
            v.rows.at_most(f"eq4_18_matrices_b{i}", t["X"][i], apart + (weights - apart) * any_matrix)
        used.append(p.products * any_matrix)
    v.host_left = p.cpu_budget - p.ring - pulp.lpSum(used)
    v.rows.at_most("eq4_18_host_memory", 0, v.host_left)


def update_of_first_on_device(v: Columns) -> None:
    """Add X[0] = 0: the CPU updates no weights of the first block."""
    v.rows.equal("side_of_b0", v.total["X"][0], 0)


def update_of_first_on_cpu(v: Columns) -> None:
    """Add X[0] = w[0]: the CPU updates all weights of the first block that may leave the device."""
    v.rows.equal("side_of_b0", v.total["X"][0], v.p.weights[0])

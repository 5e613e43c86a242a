"""Adds the integer program's rows for the duration of stages, thesis (4.19)-(4.23).

Symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

import pulp

from planner.ilp.columns import FETCHES, Columns, position
from planner.ilp.stored_activations import awaited, coming, leaving, moved_activations
from planner.ilp.stored_rows import Passes, drive_keeps_its_rate, gradients_between_rounds, own_drive_time
from planner.ilp.sums import Term
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES


def stages_last_as_long_as_their_work(v: Columns) -> None:
    """Add thesis rows (4.19)-(4.23): a stage lasts as long as the slowest of the device, both directions of the link,
    the drive, host memory and the CPU.

    work[s] ≤ rate · Time[s] for each resource and stage, launch ≤ Σ_s Time[s]; the same with RoundTime in rounds
    without updates.
    """
    p = v.p
    for s in range(p.stages):
        _stage_lasts(v, s, v.time[s], "", updates=True)
    v.rows.at_most("eq4_23_launch", p.launch, pulp.lpSum(v.time))
    drive_keeps_its_rate(v)
    if p.rounds > 1:
        for s in range(p.stages):
            _stage_lasts(v, s, v.round_time[s], "round_", updates=False)
        v.rows.at_most("round_eq4_23_launch", p.launch, pulp.lpSum(v.round_time))


def _stage_lasts(v: Columns, s: int, time: Term, name: str, *, updates: bool) -> None:
    """Add rows by which stage `s` lasts as long as its work: compute ≤ time, and bytes ≤ rate · time for h2d, d2h, CPU,
    disk and host memory.

    With `updates` it is a stage of the round with the updates, whose work is added; otherwise of the other rounds.
    """
    p, u = v.p, position(v.p, s)
    compute, h2d, d2h = _work(v, s, u)
    backward = s >= p.blocks - 1
    updated: Term = 0
    if updates:
        more, fetched, sent = _work_of_updates(v, s, u)
        compute, h2d, d2h = compute + more, h2d + fetched, d2h + sent
        passes = Passes.at(v, u)
        updated = v.flow["update"].moved(u) + passes.again
        v.rows.at_most(f"eq4_23_cpu_s{s}", p.cpu_ratio * updated, p.cpu_update * time)
    if p.shared_compute:
        others = (1 / p.h2d) * pulp.lpSum(h2d) + (1 / p.d2h) * pulp.lpSum(d2h) + (p.cpu_ratio / p.cpu_update) * updated
        compute.append(p.shared_compute * others)
    kind = "eq4_20_backward" if backward else "eq4_19_forward"
    v.rows.at_most(f"{name}{kind}_s{s}", pulp.lpSum(compute), time)
    v.rows.at_most(f"{name}eq4_21_prefetch_s{s}", pulp.lpSum(h2d), p.h2d * time)
    v.rows.at_most(f"{name}eq4_22_offload_s{s}", pulp.lpSum(d2h), p.d2h * time)
    passes = Passes.at(v, u) if updates else Passes()
    read, written = moved_activations(v, s)
    if not updates:
        sums = gradients_between_rounds(v, u)
        read, written = read + sums, written + sums
    if any(p.on_disk) or any(p.wholly_on_disk) or p.stores_activations or (updates and p.stored):
        work = _read(v, s, u) + read + (p.disk / p.disk_write) * written + passes.drive_bytes(v)
        v.rows.at_most(f"{name}disk_s{s}", work, p.disk * time)
    traffic = pulp.lpSum(h2d) + pulp.lpSum(d2h) + UPDATE_TRAFFIC_BYTES * p.parameter_ratio * updated
    traffic += passes.host_bytes(v) + read + written
    v.rows.at_most(f"{name}host_bandwidth_s{s}", traffic, p.host * time)


def _read(v: Columns, s: int, u: int) -> Term:
    """Bytes of weights that a stage reads from disk: the share of the fetched weights that is on disk."""
    p, flow = v.p, v.flow
    frozen, trained = sum(d * z for d, z in zip(p.on_disk, p.frozen, strict=True)), sum(p.wholly_on_disk)
    share = (frozen + trained) / max(1e-12, sum(p.frozen) + sum(p.weights))
    fetched = [flow["fetch_R"].moved(u), flow["fetch_E"].moved(s)]
    updated = [flow["fetch_X"].moved(u)] if trained else []
    if u == 0:
        fetched.append(flow["fetch_R"].moved(p.stages))
        updated += [flow["fetch_X"].moved(p.stages)] if trained else []
    return share * pulp.lpSum(fetched) + trained / max(1e-12, sum(p.weights)) * pulp.lpSum(updated)


def _work(v: Columns, s: int, u: int) -> tuple[list[Term], list[Term], list[Term]]:
    """The work of a stage in every round: computing time, with waits for its own copies; bytes to the device; bytes to
    the host."""
    p, flow = v.p, v.flow
    i = s if s < p.blocks else p.stages - 1 - s
    compute: list[Term] = []
    if s < p.blocks:
        compute.append(v.choice(i, "forward"))
        compute.append((1 / p.h2d) * pulp.lpSum(v.own[name][i] for name in FETCHES))
    if s >= p.blocks - 1:
        compute += [v.choice(i, "backward"), (p.gradient_ratio / p.d2h) * v.own["send_X"][i]]
        compute.append((1 / p.h2d) * v.own["fetch_E"][i])
    compute.append((1 / p.h2d) * awaited(v, s))
    h2d: list[Term] = [flow[name].moved(u) for name in FETCHES] + [flow["fetch_E"].moved(s)]
    if u == 0:  # the head's own fetch, a cycle after its backward
        h2d += [flow[name].moved(p.stages) for name in FETCHES]
    h2d += [coming(v, s), v.gradients_coming(s)]
    d2h: list[Term] = [p.gradient_ratio * flow["send_X"].moved(u), leaving(v, s)]
    return compute, h2d, d2h


def _work_of_updates(v: Columns, s: int, u: int) -> tuple[list[Term], list[Term], list[Term]]:
    """A stage's work once a step, as in `_work`: updates on the device, their states, copies of what they changed."""
    p, flow = v.p, v.flow
    compute: list[Term] = [p.stage_update[s]]
    if s == 0:
        compute.append((p.cpu_ratio / p.cpu_update) * v.own_update)
        if p.stored:
            compute.append(own_drive_time(v))
    if s >= p.blocks - 1:
        i = p.stages - 1 - s
        sends = pulp.lpSum(v.own[name][i] for name in ("send_N", "send_D", "send_Y"))
        compute += [_gpu_updates(v, s, i), (1 / p.d2h) * sends, (1 / p.h2d) * v.own["fetch_Y"][i]]
    d2h: list[Term] = [flow["send_N"].moved(u), flow["send_D"].moved(u), flow["send_K"].moved(s), v.send_Y[u]]
    return compute, [v.fetch_Y[u]], d2h


def _gpu_updates(v: Columns, s: int, i: int) -> Term:
    """Time of the updates at the end of stage s; with clipping all are at the end of block 0's backward."""
    p = v.p
    if p.clip and s < p.stages - 1:
        return 0
    blocks = range(p.blocks) if p.clip else [i]
    updated = pulp.lpSum(p.weights[j] - v.total["X"][j] for j in blocks)
    return (p.gpu_ratio / p.gpu_update) * updated

"""The O-ILP as printed: a variable per block, stage and kind of transfer; the slow reference for the aggregated one.

Thesis 4.1-4.23 in physical order (an update's weight comes back after the update), with the same refinements: gradient
bytes, slices, option peaks through `planner.schedule.peak_moments`, both directions, host bandwidth, clipping,
launching as total work, and own transfers in the very stage, which overlap nothing. Nothing is summed over blocks, no
nesting is used: one column per (block, stage) and kind, O(L²) in all.
"""

from __future__ import annotations

from typing import Any

import pulp

from planner.ilp.columns import limits_of
from planner.ilp.instance import Instance
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES


class _Moves:
    """Per stage of one cycle from `start` on: what moved in each stage, only within [first, last] stages after it."""

    def __init__(self, problem: pulp.LpProblem, name: str, stages: int, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.at = {d: problem.add_variable(f"{name}_{d}", 0) for d in range(first, last + 1)}
        self.stages = stages

    def upto(self, d: int) -> Any:
        """Sum of what moved up to `d` stages after the start."""
        return pulp.lpSum(x for e, x in self.at.items() if e <= d)

    def all(self) -> Any:
        return pulp.lpSum(self.at.values())

    def moved(self, d: int) -> Any:
        return self.at.get(d, 0)


def printed_step(p: Instance, *, barrier: bool = False, relax: bool = False) -> float | None:
    """The optimal step in seconds of the printed program; None when it is infeasible. `barrier`: an update's weight
    comes back from the stage after the update's on."""
    L, T = p.blocks, p.stages
    m = pulp.LpProblem("printed", pulp.LpMinimize)
    limits = limits_of(p)
    category = "Continuous" if relax else "Binary"
    comp = [[m.add_variable(f"c_{i}_{c.index}", 0, 1, category) for c in p.choices[i]] for i in range(L)]
    time = [m.add_variable(f"t_{s}", 0) for s in range(T)]
    total = {k: [m.add_variable(f"{k}_{i}", 0, of[i]) for i in range(L)] for k, of in limits.items()}
    frozen = [m.add_variable(f"Z_{i}", 0, p.frozen[i]) for i in range(L)]
    ratio = p.state_ratio

    def chosen(i: int, what: str) -> Any:
        return pulp.lpSum(getattr(c, what) * x for c, x in zip(p.choices[i], comp[i], strict=True))

    for i in range(L):
        m += pulp.lpSum(comp[i]) == 1
        m += total["X"][i] + total["N"][i] + total["D"][i] + total["K"][i] <= p.weights[i]
        m += total["R"][i] <= frozen[i]
        m += total["E"][i] <= total["X"][i] + total["N"][i] + frozen[i]
        m += total["Y"][i] + ratio[i] * total["X"][i] <= p.states[i]

    # Everything below counts stages d after block i's backward (d = 0), its forward is at d = f, or after its forward.
    d2h: list[list[Any]] = [[] for _ in range(T)]
    h2d: list[list[Any]] = [[] for _ in range(T)]
    cpu: list[list[Any]] = [[] for _ in range(T)]
    exposed: list[list[Any]] = [[] for _ in range(T)]  # of transfers at a block's own stage
    away: list[list[Any]] = [[] for _ in range(T)]  # weights and states not on the device, per stage
    extra: list[list[Any]] = [[] for _ in range(T)]  # gradients still there

    rate_down, rate_up = 1 / p.d2h, 1 / p.h2d
    for i in range(L):
        g = T - 1 - i
        f = 2 * i + 1  # stages from the backward to the next forward; the head's are one stage, a cycle apart
        f = T if i == L - 1 else f
        end = i  # d of block 0's backward

        def stage(d: int, g: int = g) -> int:
            return (g + d) % T

        send = _Moves(m, f"sX_{i}", T, 0, end)
        update = _Moves(m, f"u_{i}", T, end + 1 if p.clip else 1, max(f - 1, 1))
        fetch = _Moves(m, f"fX_{i}", T, 1, f)
        sent_n, fetch_n = _Moves(m, f"sN_{i}", T, 0, f - 1), _Moves(m, f"fN_{i}", T, 1, f)
        fetch_r = _Moves(m, f"fR_{i}", T, 1, f)
        sent_d = _Moves(m, f"sD_{i}", T, 0, f)
        x, n, r = total["X"][i], total["N"][i], total["R"][i]
        m += send.all() == x
        m += update.all() == x
        m += fetch.all() == x
        m += sent_n.all() == n
        m += fetch_n.all() == n
        m += fetch_r.all() == r
        m += sent_d.all() == total["D"][i]
        for d in range(T + 1):
            m += update.upto(d) <= (send.upto(d) if d else 0)
            m += fetch.upto(d) <= update.upto(d - 1 if barrier and i else d)
            m += fetch_n.upto(d) <= sent_n.upto(d - 1)
        for d in range(T + 1):
            s = stage(d)
            d2h[s] += [p.gradient_ratio * send.moved(d), sent_n.moved(d), sent_d.moved(d)]
            h2d[s] += [fetch.moved(d), fetch_n.moved(d), fetch_r.moved(d)]
            cpu[s].append(p.parameter_ratio * update.moved(d))
        exposed[g] += [rate_down * (p.gradient_ratio * send.moved(0) + sent_n.moved(0) + sent_d.moved(0))]
        if i == 0:  # its next forward follows at once, and waits
            exposed[0].append(p.parameter_ratio / p.cpu_update * update.moved(1))
        exposed[i] += [rate_up * (fetch.moved(f) + fetch_n.moved(f) + fetch_r.moved(f))]
        for d in range(1, T if i == L - 1 else f):
            s = stage(d)
            gone = x + r + sent_n.upto(d - 1) - fetch.upto(d) - fetch_n.upto(d) - fetch_r.upto(d)
            away[s].append(gone)
            if d <= end:
                extra[s].append(p.gradient_ratio * (x - send.upto(d - 1)))
                if p.clip:
                    extra[s].append(p.gradients[i] - p.gradient_ratio * x)
        # after the forward
        if i < L - 1:
            gap = g - i
            sent_k, back = _Moves(m, f"sK_{i}", T, 1, gap - 1), _Moves(m, f"b_{i}", T, 1, gap)
            dropped = total["E"][i] + total["D"][i]
            m += sent_k.all() == total["K"][i]
            m += back.all() == dropped + total["K"][i]
            for d in range(1, gap + 1):
                m += back.upto(d) <= dropped + sent_k.upto(d - 1)
                s = i + d
                d2h[s].append(sent_k.moved(d))
                h2d[s].append(back.moved(d))
                if d < gap:
                    away[s].append(dropped + sent_k.upto(d - 1) - back.upto(d))
            exposed[g].append(rate_up * back.moved(gap))
        # states: one cycle from use to use
        use = T - 1 if p.clip else g
        out, again = _Moves(m, f"sY_{i}", T, 0, T - 1), _Moves(m, f"fY_{i}", T, 1, T)
        m += out.all() == total["Y"][i]
        m += again.all() == total["Y"][i]
        for d in range(1, T + 1):
            m += again.upto(d) <= out.upto(d - 1)
        for d in range(T + 1):
            s = (use + d) % T
            d2h[s].append(out.moved(d))
            h2d[s].append(again.moved(d))
            if 0 < d < T:
                away[s].append(out.upto(d - 1) - again.upto(d))
        # In the stage of the use itself what comes in it is there, and what is sent is still there: nothing is away.
        exposed[use] += [rate_down * out.moved(0), rate_up * again.moved(T)]

    weights, states = sum(p.weights) + sum(p.frozen), sum(p.states)
    on_host = pulp.lpSum(ratio[i] * total["X"][i] for i in range(L))
    for moment in p.moments:
        s = moment.stage
        own = pulp.lpSum(
            b / p.unit_bytes * comp[i][k]
            for (i, o), b in moment.bytes_of.items()
            for k, c in enumerate(p.choices[i])
            if c.index == o
        )
        kept = pulp.lpSum(chosen(j, "kept") for j in range(moment.before + 1))
        m += (
            p.stage_standing[s]
            + moment.fixed_bytes / p.unit_bytes
            + own
            + kept
            + weights
            + states
            - on_host
            - pulp.lpSum(away[s])
            + pulp.lpSum(extra[s])
            <= p.gpu_budget
        )
    host = [
        (1 + p.host_gradient_ratio + ratio[i]) * total["X"][i]
        + sum(total[k][i] for k in "NDKY")
        + frozen[i]
        + chosen(i, "offloaded")
        for i in range(L)
    ]
    m += pulp.lpSum(host) <= p.cpu_budget
    # Activations of each slice travel in the turn after its forward's and in the one before its backward's.
    turns = [(s, k) for s in range(T) for k in range(p.slices)]
    for i in range(L - 1):
        for k in range(p.slices):
            forth, back = turns.index((i, k)), turns.index((T - 1 - i, k))
            part = (1 / p.slices) * chosen(i, "offloaded")
            d2h[turns[forth + 1][0]].append(part)
            again = max(forth + 2, back - 1)
            h2d[turns[again][0]].append(part)
            if again == back:
                exposed[T - 1 - i].append(rate_up * part)
    for s in range(T):
        i = min(s, T - 1 - s)
        forward, backward = s < L, s >= L - 1
        compute = [p.stage_update[s], *exposed[s]]
        if forward:
            compute.append(chosen(i, "forward"))
        if backward:
            compute.append(chosen(i, "backward"))
            updated = (range(L) if s == T - 1 else []) if p.clip else [i]
            compute += [p.parameter_ratio / p.gpu_update * (p.weights[j] - total["X"][j]) for j in updated]
        m += time[s] >= pulp.lpSum(compute)
        m += p.h2d * time[s] >= pulp.lpSum(h2d[s])
        m += p.d2h * time[s] >= pulp.lpSum(d2h[s])
        m += p.cpu_update * time[s] >= pulp.lpSum(cpu[s])
        m += p.host * time[s] >= pulp.lpSum(h2d[s]) + pulp.lpSum(d2h[s]) + UPDATE_TRAFFIC_BYTES * pulp.lpSum(cpu[s])
    m += pulp.lpSum(time) >= p.launch
    m.setObjective(pulp.lpSum(time))
    m.solve(pulp.HiGHS(msg=False, threads=1, timeLimit=60, gapRel=1e-6))
    if m.sol_status != pulp.LpSolutionOptimal:
        return None
    return float(pulp.value(m.objective)) * p.unit_s

"""Defines the variables of the integer program (O-ILP): bytes of each block per placement, bytes moved in each stage,
and running sums of both.

Symbols are those of the legend in `planner.ilp.program`.
"""

from __future__ import annotations

import pulp

from planner.ilp.instance import Instance
from planner.ilp.sums import Flow, Rows, Sums, Term

SENDS = ("send_X", "send_N", "send_D")
FETCHES = ("fetch_X", "fetch_N", "fetch_R")


def limits_of(p: Instance) -> dict[str, list[float]]:
    """The upper limits of the totals, in scaled bytes: for each kind of total ("X", "N", …: see `planner.ilp.program`)
    a list over blocks. A limit is 0 if the block has no time for such an absence, or if clipping forbids it."""
    last = p.blocks - 1
    stored = {"V": p.stored.may} if p.stored else {}
    if p.stored and p.clip and p.rounds == 1:  # the head's next gradient comes at once: its states cannot wait
        stored["U"] = [0.0 if i == last else w for i, w in enumerate(p.stored.trails)]
    return stored | {
        "X": [w if able else 0.0 for w, able in zip(p.weights, p.cpu_updatable, strict=True)],
        "N": [0.0 if p.clip or i == 0 else w for i, w in enumerate(p.weights)],
        "R": [0.0 if i == 0 else z for i, z in enumerate(p.frozen)],
        "E": [0.0 if i == last else w + z for i, (w, z) in enumerate(zip(p.weights, p.frozen, strict=True))],
        "D": [0.0 if p.clip or i == last else w for i, w in enumerate(p.weights)],
        "K": [0.0 if i == last else w for i, w in enumerate(p.weights)],
        "Y": [0.0 if p.clip and i else y for i, y in enumerate(p.states)],
    }


class Columns:
    """All variables of one integer program, and their running sums."""

    def __init__(self, rows: Rows, p: Instance) -> None:
        L, T = p.blocks, p.stages
        self.rows, self.p = rows, p
        self.comp = [[rows.variable(f"Comp_{i}_{c.index}", binary=True) for c in p.choices[i]] for i in range(L)]
        self.time = [rows.variable(f"Time_{s}") for s in range(T)]
        self.round_time = [rows.variable(f"RoundTime_{s}") for s in range(T)] if p.rounds > 1 else []
        limits = limits_of(p)
        self.total = {
            kind: [rows.variable(f"{kind}_{i}", limit) for i, limit in enumerate(of)] for kind, of in limits.items()
        }
        self.frozen_moved = [rows.variable(f"Z_{i}", w) for i, w in enumerate(p.frozen)]
        self.sum = {kind: Sums(rows, kind, of) for kind, of in self.total.items()}
        dropped = [e + d for e, d in zip(self.total["E"], self.total["D"], strict=True)]
        self.sum["ED"] = Sums(rows, "ED", dropped)  # away from the end of the forward on
        self.sum["S"] = Sums(rows, "S", [self.choice(i, "kept") for i in range(L)])
        self.flow = {name: Flow(rows, name, T) for name in (*SENDS, "update", "send_K", "fetch_E")}
        self.flow |= {name: Flow(rows, name, T + 1) for name in FETCHES}  # the head's own fetch is at u = T
        self.send_Y = [rows.variable(f"send_Y_{u}") for u in range(T)]
        self.fetch_Y = [rows.variable(f"fetch_Y_{u}") for u in range(T)]
        self.waiting = [rows.variable(f"waiting_Y_{u}") for u in range(T)]
        self.back = [rows.variable(f"back_Y_{u}") for u in range(T)]
        self.away = [rows.variable(f"away_Y_{u}") for u in range(T)]
        self.excess = [rows.variable(f"excess_{s}", 0) for s in range(T)]  # above the budget: see `solve_oilp`
        self.own = {
            name: [rows.variable(f"own_{name}_{i}") for i in range(L)]
            for name in (*SENDS, *FETCHES, "fetch_E", "send_Y", "fetch_Y")
        }
        if p.stores_activations:
            self.flow |= {name: Flow(rows, name, T) for name in ("write_S", "read_S")}  # at stages
            self.passing, self.staying = rows.variable("ring_S"), rows.variable("stay_S")
        if p.stored:
            self.flow["updV"] = Flow(rows, "updV", T)
            self.own_stored = rows.variable("own_stored_0")
        if "U" in self.total:
            self.flow["updU"] = Flow(rows, "updU", T)
            self.flow["restU"] = Flow(rows, "restU", T)
            self.own_trailing = rows.variable("own_trailing_0")
        self.own_update = rows.variable("own_update_0")  # in block 0's forward: block 0 has no gap before it
        self.host_left: Term = 0  # host memory that nothing uses: see `planner.ilp.rows.host_memory_fits`

    def step_time(self) -> Term:
        """The expression for the duration of a step: one round with the updates, and all other rounds."""
        return pulp.lpSum(self.time) + (self.p.rounds - 1) * pulp.lpSum(self.round_time)

    def gradients_coming(self, s: int) -> Term:
        """The expression for the gradient bytes fetched in stage `s`. With several rounds, a gradient that is sent to
        the CPU comes back in the stage before the one that adds to it."""
        p, i = self.p, self.p.stages - 2 - s
        return p.gradient_ratio * self.total["X"][i] if p.rounds > 1 and 0 <= i < p.blocks else 0

    def choice(self, i: int, figure: str) -> Term:
        """The expression for a figure of block i's chosen option; `figure` names a field of `Choice`."""
        figures = (getattr(c, figure) for c in self.p.choices[i])
        return pulp.LpAffineExpression(dict(zip(self.comp[i], figures, strict=True)))

    def states_on_host(self, i: int) -> Term:
        """The expression for the optimizer state bytes of those of block i's weights that the CPU updates: the states
        are always on the host, or on its disk."""
        return self.p.state_ratio[i] * self.total["X"][i]

    def released(self, kind: str, u: int) -> Term:
        """The expression for the sum of the total `kind` (such as "X") over the blocks whose backward has ended by the
        end of position `u`; positions count stages from the head's on."""
        return self.sum[kind].since(max(0, self.p.blocks - 1 - u)) if u >= 0 else 0

    def dropped(self, v: int) -> Term:
        """The expression for the weight bytes that may be away after forward (E + D in the legend), of the blocks whose
        forward has ended by the end of stage `v`."""
        return self.sum["ED"].upto(v)


# Keys: positions after backward; for flows after forward, stages.


def backward_position(p: Instance, i: int) -> int:
    return p.blocks - 1 - i


def forward_position(p: Instance, i: int) -> int:
    return p.blocks + i


def position(p: Instance, s: int) -> int:
    return (s - (p.blocks - 1)) % p.stages

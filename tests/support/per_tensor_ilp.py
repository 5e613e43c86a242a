"""The O-ILP with a binary per tensor and placement: the best step of whole tensors, as far as stages can tell.

Totals are then sums of tensors, not parts of blocks. Transfers may still be spread over stages, as in
`planner.ilp.program`, so no choice of placements has a better step in whole stages. There are some hundred binaries for
a short chain, too many for a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulp

from planner.candidate.candidate import settled
from planner.ilp.columns import Columns, limits_of
from planner.ilp.instance import Instance, tensor_lists
from planner.ilp.program import Solution, build, solution_of
from planner.ilp.solver import solve
from planner.ilp.sums import Term
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor
from planner.search.placements import Placement
from planner.search.round_placements import placements_of

_KINDS = ("X", "N", "R", "E", "D", "K", "Y")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The solution, what each tensor does in it, and seconds of a step below which the solver found there is none."""

    solution: Solution
    placements: list[Placement]
    bound_s: float


class _Choices:
    """The binaries of one block: kind -> tensor's name -> chosen."""

    def __init__(
        self, v: Columns, block: int, trainable: Sequence[Tensor], frozen: Sequence[Tensor], staying: Sequence[Tensor]
    ) -> None:
        self.v, self.block = v, block
        limits = {kind: of[block] for kind, of in limits_of(v.p).items()}
        may = dict.fromkeys(_KINDS, trainable) | {"R": frozen, "E": (*trainable, *frozen), "Y": (*trainable, *staying)}
        self.tensors = {kind: may[kind] if limits[kind] else () for kind in _KINDS}
        self.of = {
            kind: {
                tensor.name: v.rows.variable(f"whole_{kind}_{block}_{n}", binary=True)
                for n, tensor in enumerate(self.tensors[kind])
            }
            for kind in _KINDS
        }

    def chosen(self, kinds: str, tensor: Tensor) -> Term:
        """How many of these kinds the tensor has."""
        return pulp.lpSum(self.of[kind].get(tensor.name, 0) for kind in kinds)

    def add_rows(self, trainable: Sequence[Tensor], frozen: Sequence[Tensor]) -> None:
        """(4.3), (4.6) tensor by tensor."""
        rows, i, unit = self.v.rows, self.block, self.v.p.unit_bytes
        for kind, of in self.of.items():
            sizes = {t.name: (t.state_bytes if kind == "Y" else t.bytes) / unit for t in self.tensors[kind]}
            rows.equal(
                f"whole_{kind}_b{i}", self.v.total[kind][i], pulp.lpSum(sizes[name] * x for name, x in of.items())
            )
        for n, tensor in enumerate(trainable):
            rows.at_most(f"whole_weight_b{i}_{n}", self.chosen("XNDK", tensor), 1)
            rows.at_most(f"whole_current_b{i}_{n}", self.chosen("E", tensor), self.chosen("XN", tensor))
            rows.at_most(f"whole_states_b{i}_{n}", self.chosen("XY", tensor), 1)
        moved = []
        for n, tensor in enumerate(frozen):
            moved.append(rows.variable(f"whole_Z_{i}_{n}", binary=True))
            for kind in "RE":
                rows.at_most(f"whole_moved_{kind}_b{i}_{n}", self.chosen(kind, tensor), moved[-1])
        on_host = (t.bytes / unit * z for t, z in zip(frozen, moved, strict=True))
        rows.equal(f"whole_Z_b{i}", self.v.frozen_moved[i], pulp.lpSum(on_host))

    def taken(self) -> dict[str, list[Tensor]]:
        """Per kind the tensors that the solver has chosen."""
        return {
            kind: [t for t in self.tensors[kind] if (of[t.name].value() or 0.0) > 0.5] for kind, of in self.of.items()
        }


def solve_whole(p: Instance, chain: Chain, hardware: Hardware, *, gap: float) -> Whole | None:
    """The best step of whole tensors within `gap`; None when there is none, or none was found in time."""
    v = build(p)
    trainable, frozen = ([[t for t in ts if t.bytes] for ts in lists] for lists in tensor_lists(chain, hardware))
    lists = list(zip(trainable, frozen, settled(chain, hardware), strict=True))
    choices = [_Choices(v, i, *of_block) for i, of_block in enumerate(lists)]
    for block, (moving, still, _) in zip(choices, lists, strict=True):
        block.add_rows(moving, still)
    v.rows.problem.setObjective(v.step_time())
    outcome = solve(v.rows.problem, gap=gap)
    if not outcome.found:
        return None
    placements = placements_of(chain, hardware, [block.taken() for block in choices])
    return Whole(solution=solution_of(v, outcome), placements=placements, bound_s=max(0.0, outcome.bound) * p.unit_s)

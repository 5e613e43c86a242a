"""One question for the planner: a chain, a machine, budgets and a step, as a value."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, replace

from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.ilp.program import Solution
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.make_plan import (
    GAP,
    REMEMBERED,
    TIME_LIMIT_S,
    LeastBudget,
    bound_of,
    in_rounds,
    least_budget,
    least_gpu_bytes,
    make_plan,
    rounds_that_fit,
    too_small,
)
from planner.search.portfolio import Search
from planner.search.round_placements import hoped

_NEAR_BYTES = 2**30  # how exactly a least host budget is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question for the planner. `slices` are those of a step. Without `cpu_updates` no plan has CPU updates, without
    `activation_offload` none offloads activations. `not_in_files`: why loading takes host memory for all weights, so
    that none is on disk; None: the model's files have the weights in the form that the job uses."""

    chain: Chain
    hardware: Hardware
    gpu_budget_bytes: int
    cpu_budget_bytes: int
    slices: int
    clip: bool
    cpu_updates: bool = True
    activation_offload: bool = True
    not_in_files: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.slices * self.chain.slice_tokens

    @property
    def setting(self) -> Setting:
        """The problem as the searches take it, in one round."""
        budgets = Budgets(
            gpu_bytes=self.gpu_budget_bytes,
            cpu_bytes=self.cpu_budget_bytes,
            cpu_updates=self.cpu_updates,
            activation_offload=self.activation_offload,
        )
        return Setting(chain=self.chain, hardware=self.hardware, budgets=budgets, slices=self.slices, clip=self.clip)

    def plan(self, time_limit_s: float = TIME_LIMIT_S, gap: float = GAP) -> Plan:
        """The fastest plan found: see `make_plan`. Raises UserError `budget-too-small` and `host-memory-too-small`."""
        return make_plan(self.setting, time_limit_s=time_limit_s, gap=gap)

    def least(self) -> LeastBudget:
        """The least device budget with which there is a plan, whatever `gpu_budget_bytes` is. Raises UserError
        `host-memory-too-small`."""
        return least_budget(self.setting)

    def plan_in(self, rounds: int, time_limit_s: float, beat_s: float) -> Plan | None:
        """A plan in `rounds` rounds, found in a third of the time of `plan`. None where the solver hopes for no step
        below `beat_s`, or finds nothing that fits."""
        s = replace(self.setting, rounds=rounds, slices=self.slices // rounds)
        bound_s = bound_of(s)
        s = next((fitting for fitting in rounds_that_fit(self.setting) if fitting.rounds == rounds), s)
        bound_s = 0.0 if bound_s == math.inf else bound_s  # a proof that there is no plan comes from tolerances
        deadline = time.monotonic() + time_limit_s
        return Search(s, deadline=deadline, gap=GAP, beat_s=beat_s, bound_s=bound_s).first()

    def bound_s(self) -> float:
        """Seconds that no plan of this problem beats."""
        return min(map(bound_of, in_rounds(self.setting)))

    def hope_s(self) -> float:
        """Seconds of the solver's step, before rounding, in as many rounds as are best; infinity where it finds none.

        This takes a fraction of a plan's time, and does not depend on a time limit of the caller.
        """
        solution = self.hoped()
        return solution.step_s if solution else math.inf

    def hoped(self, *, states_anywhere: bool = False) -> Solution | None:
        """The solver's answer in as many rounds as are best. `states_anywhere`: see `Setting`."""
        return _hoped(replace(self.setting, states_anywhere=states_anywhere))

    def least_bytes(self, *, enough: int = 0, rounds: int | None = None) -> int | None:
        """The least device budget with this host budget, or the first one found that is at most `enough`; in `rounds`
        rounds, or in any number of them. None where the host is too small for any plan."""
        try:
            return least_gpu_bytes(self.setting, enough=enough, rounds=rounds)
        except UserError:
            return None

    def fits(self, rounds: int | None = None) -> bool:
        """Whether there is a plan, in `rounds` rounds or, with None, in any number of them."""
        if self._standing_bytes() > self.gpu_budget_bytes + self.cpu_budget_bytes:
            return False
        least = self.least_bytes(enough=self.gpu_budget_bytes, rounds=rounds)
        return least is not None and least <= self.gpu_budget_bytes

    def check_fits(self) -> None:
        """Raise the UserError of `plan` where nothing fits, without a search for a fast plan."""
        if not self.fits():
            raise too_small(self.setting)

    def _standing_bytes(self) -> int:
        """Bytes of the weights and states that are in memory, of the device or of the host."""
        return sum(
            (0 if t.on_disk else t.bytes) + (0 if t.states_on_disk else t.state_bytes) for t in self.chain.tensors()
        )

    def least_cpu_bytes(self) -> int | None:
        """About the least host budget with this device budget, by bisection; None where no host is large enough."""

        def fits(size: int) -> bool:
            return replace(self, cpu_budget_bytes=size).fits()

        tensors = list(self.chain.tensors())
        standing = self._standing_bytes()
        offloaded = sum(max(o.offloaded_bytes for o in b.options) for b in self.chain.blocks)
        low = max(0, standing - self.gpu_budget_bytes)  # all of it is somewhere
        high = standing + sum(t.gradient_bytes for t in tensors)
        if not fits(high):
            low, high = high, high + self.slices * offloaded
            if not fits(high):
                return None
        while high - low > _NEAR_BYTES:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


@functools.lru_cache(REMEMBERED)
def _hoped(step: Setting) -> Solution | None:
    best: Solution | None = None
    for bound_s, s in sorted(((bound_of(s), s) for s in rounds_that_fit(step)), key=lambda each: each[0]):
        if best and bound_s >= best.step_s:
            break
        solved = hoped(s, gap=GAP, deadline=time.monotonic() + TIME_LIMIT_S)
        best = min([*([best] if best else []), *solved], key=lambda found: found.step_s, default=None)
    return best

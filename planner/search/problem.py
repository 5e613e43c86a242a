"""Defines the question that the planner answers: a model, a machine, memory budgets and a training step, as one
value."""

from __future__ import annotations

import functools
import math
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

_NEAR_BYTES = 2**30  # a least host budget is found to within this


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question for the planner: which plan trains this model (`chain`, its blocks in order) fastest on this machine?

    `slices`: micro-batches of a step. `clip`: gradients are clipped by their global norm. Without `cpu_updates` the CPU
    updates no weights, without `activation_offload` no activations are moved to the host. `not_in_files`: the reason
    why loading the model needs host memory for all its weights, so that none can be read from disk during training;
    None: the model's files have the weights in the form that the job uses.
    """

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
        """Tokens of a training step."""
        return self.slices * self.chain.slice_tokens

    @property
    def setting(self) -> Setting:
        """The problem in the form that the search functions take. All micro-batches of a step
        are in one round: they go through the model together, block by block."""
        budgets = Budgets(
            gpu_bytes=self.gpu_budget_bytes,
            cpu_bytes=self.cpu_budget_bytes,
            cpu_updates=self.cpu_updates,
            activation_offload=self.activation_offload,
        )
        return Setting(chain=self.chain, hardware=self.hardware, budgets=budgets, slices=self.slices, clip=self.clip)

    def plan(self, *, gap: float = GAP) -> Plan:
        """Return the fastest plan found. `gap`: how much slower than the optimum a
        solution of the planner's integer program may be, as a share of the time. Raises UserError `budget-too-small` or
        `host-memory-too-small` where nothing fits the budgets."""
        return make_plan(self.setting, gap=gap)

    def least(self) -> LeastBudget:
        """Return the least GPU memory for which there is a plan, whatever `gpu_budget_bytes` is. Raises UserError
        `host-memory-too-small`."""
        return least_budget(self.setting)

    def plan_in(self, rounds: int, beat_s: float) -> Plan | None:
        """Return a plan that runs the micro-batches of a step in `rounds` rounds, each a forward and backward of its
        share through the model. The search takes a third of the time of `plan`. None where nothing fits, or where the
        planner's integer program finds no step shorter than `beat_s` seconds."""
        s = replace(self.setting, rounds=rounds, slices=self.slices // rounds)
        bound_s = bound_of(s)
        s = next((fitting for fitting in rounds_that_fit(self.setting) if fitting.rounds == rounds), s)
        # Not a proof that there is no plan: it may come from the solver's tolerances alone.
        bound_s = 0.0 if bound_s == math.inf else bound_s
        return Search(s, gap=GAP, beat_s=beat_s, bound_s=bound_s).first()

    def bound_s(self) -> float:
        """Return a lower bound on the seconds of a step: no plan of this problem is faster."""
        return min(map(bound_of, in_rounds(self.setting)))

    def hope_s(self) -> float:
        """Return the seconds of a step by the planner's integer program, which may move parts of tensors, for the best
        number of rounds; infinity where there is none. A plan of whole tensors is about as fast.

        This takes a fraction of a plan's time.
        """
        solution = self.hoped()
        return solution.step_s if solution else math.inf

    def hoped(self, *, states_anywhere: bool = False) -> Solution | None:
        """Return the solution of the planner's integer program for the best number of rounds; None where there is none.
        `states_anywhere`: the solver also decides which optimizer states are on disk."""
        return _hoped(replace(self.setting, states_anywhere=states_anywhere))

    def least_bytes(self, *, enough: int = 0, rounds: int | None = None) -> int | None:
        """Return the least GPU memory in bytes for which there is a plan with this host budget, or the first amount
        found that is at most `enough`. `rounds`: the number of rounds in which the plan runs a step's micro-batches;
        None: any. Returns None where the host's memory is too small for any plan."""
        try:
            return least_gpu_bytes(self.setting, enough=enough, rounds=rounds)
        except UserError:
            return None

    def fits(self, rounds: int | None = None) -> bool:
        """Return whether there is a plan within the GPU and host budgets. `rounds`: the number of rounds in which it
        runs a step's micro-batches; None: any."""
        if self.standing_bytes() > self.gpu_budget_bytes + self.cpu_budget_bytes:
            return False
        least = self.least_bytes(enough=self.gpu_budget_bytes, rounds=rounds)
        return least is not None and least <= self.gpu_budget_bytes

    def check_fits(self) -> None:
        """Raise UserError `budget-too-small` or `host-memory-too-small` where no plan fits the budgets. Does not search
        for a fast plan."""
        if not self.fits():
            raise too_small(self.setting)

    def standing_bytes(self) -> int:
        """Return the bytes of all weights and optimizer states that are not on disk: they are in GPU or host memory."""
        return sum(
            (0 if t.on_disk else t.bytes) + (0 if t.states_on_disk else t.state_bytes) for t in self.chain.tensors()
        )

    def least_cpu_bytes(self) -> int | None:
        """Return the least host memory in bytes for which there is a plan with this GPU budget, found by bisection and
        at most 1 GiB too large. None where no host is large enough."""

        def fits(size: int) -> bool:
            return replace(self, cpu_budget_bytes=size).fits()

        tensors = list(self.chain.tensors())
        standing = self.standing_bytes()
        offloaded = sum(max(o.offloaded_bytes for o in b.options) for b in self.chain.blocks)
        low = max(0, standing - self.gpu_budget_bytes)  # weights and states are either on the device or on the host
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
        solved = hoped(s, gap=GAP)
        best = min([*([best] if best else []), *solved], key=lambda found: found.step_s, default=None)
    return best

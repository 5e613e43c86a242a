"""Defines the question that the planner answers: a model, a machine, memory budgets and a training step, as one
value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from planner.candidate.setting import Budgets, Setting
from planner.errors import UserError
from planner.ilp.narrow import relaxed_s
from planner.ilp.program import Solution
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search.make_plan import (
    GAP,
    LeastBudget,
    Way,
    bound_of,
    for_tensors,
    in_rounds,
    least_budget,
    least_gpu_bytes,
    make_plan,
    narrowed_to,
    rounds_that_fit,
    too_small,
    ways_of,
)
from planner.search.portfolio import Search

UNLIMITED = 2**62  # bytes
_FREE = 1e-6  # of the host's budget; where less is left free, that is the solver's rounding
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
        """Return the fastest plan found. `gap`: how much slower than the optimum a solution of the planner's integer
        program may be, as a share of the time. Raises UserError `budget-too-small` or `host-memory-too-small` where
        nothing fits the budgets."""
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
        s = next((narrowed_to(*way)[0] for way in rounds_that_fit(self.setting).items() if way[0].rounds == rounds), s)
        # Not a proof that there is no plan: it may come from the solver's tolerances alone.
        bound_s = 0.0 if bound_s == math.inf else bound_s
        return Search(s, gap=GAP, beat_s=beat_s, bound_s=bound_s).first()

    def bound_s(self) -> float:
        """Return a lower bound on the seconds of a step: no plan of this problem is faster."""
        return min(map(bound_of, in_rounds(self.setting)))

    def hope_s(self, *, below_s: float = math.inf) -> float:
        """Return the seconds of a step by the planner's integer program, which may move parts of tensors, for the best
        number of rounds; infinity where there is none. A plan of whole tensors is about as fast. `below_s`: only a step
        of fewer seconds is looked for.

        This takes a fraction of a plan's time.
        """
        solution = self.hoped(below_s=below_s)
        return solution.step_s if solution else math.inf

    def hoped(self, *, states_anywhere: bool = False, below_s: float = math.inf) -> Solution | None:
        """Return the solution of the planner's integer program for the best number of rounds; None where there is none.
        `states_anywhere`: the solver also decides which optimizer states are on disk. `below_s`: only a step of fewer
        seconds is looked for."""
        step = replace(self.setting, states_anywhere=states_anywhere)
        solutions = [found for way in self._ways(step, below_s) for found in way.solved]
        return min(solutions, key=lambda found: found.step_s, default=None)

    def more_host_may_help(self, below_s: float) -> bool:
        """Return whether with more host memory a step might be shorter than `below_s` seconds. This is so if in some
        number of rounds the integer program uses all host memory there is, or has no solution, and its relaxation for
        an unlimited host has a step that short. That free memory means no gain is certain for the relaxation alone; for
        the integer program it is a rule of thumb."""
        unlimited = replace(self, cpu_budget_bytes=UNLIMITED)
        least_bytes = _FREE * self.cpu_budget_bytes
        enough = {
            way.setting.rounds
            for way in self._ways(self.setting, math.inf)
            if way.solved and all(solution.host_left_bytes > least_bytes for solution in way.solved)
        }
        others = (s for s in in_rounds(unlimited.setting) if s.rounds not in enough)
        return any(bound_of(s) < below_s and relaxed_s(s) < below_s for s in others)

    @staticmethod
    def _ways(step: Setting, below_s: float) -> tuple[Way, ...]:
        """Return the numbers of rounds in which a plan fits, with the integer program's solutions. They are those with
        which `make_plan` begins, unless no plan is sure to fit with gaps between tensors."""
        tight = for_tensors(step)
        return ways_of(tight if rounds_that_fit(tight) else step, gap=GAP, below_s=below_s)

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
        """Return the least host memory in bytes for which there is a plan with this GPU budget, at most 1 GiB too
        large. None where no host is large enough."""

        def excess_bytes(size: int) -> float:
            """Bytes by which a plan for a host of this size exceeds the GPU budget; 0 or less where it fits."""
            least = replace(self, cpu_budget_bytes=size).least_bytes(enough=self.gpu_budget_bytes)
            return math.inf if least is None else least - self.gpu_budget_bytes

        standing = self.standing_bytes()
        offloaded = sum(max(o.offloaded_bytes for o in b.options) for b in self.chain.blocks)
        low = max(0, standing - self.gpu_budget_bytes)  # weights and states are either on the device or on the host
        high = standing + sum(t.gradient_bytes for t in self.chain.tensors())
        if excess_bytes(high) > 0:
            low, high = high, high + self.slices * offloaded
            if excess_bytes(high) > 0:
                return None
        size, excess = self.cpu_budget_bytes, excess_bytes(self.cpu_budget_bytes)
        right = True  # the last guess
        while high - low > _NEAR_BYTES:
            # Mostly each byte of the excess needs one more byte of the host. After a wrong guess the range is halved.
            too_small = excess > 0
            guess = size + excess + _NEAR_BYTES // 2 if too_small else size - _NEAR_BYTES
            guesses = right and low < guess < high
            size = int(guess) if guesses else (low + high) // 2
            excess = excess_bytes(size)
            low, high = (low, size) if excess <= 0 else (size, high)
            right = not guesses or (excess <= 0) == too_small
        return high

"""Searches for one problem's plan among the candidates of the greedy algorithms and of the integer program (O-ILP), and
verifies the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from planner.candidate.candidate import Candidate
from planner.candidate.evaluate import Evaluation, evaluate, fits, proven
from planner.candidate.setting import Budgets, RateScale, Setting
from planner.candidate.trailing import ways_to_trail
from planner.candidate.update_ahead import ahead_of_norm
from planner.greedy.streaming import candidates
from planner.ilp.program import Solution
from planner.ilp.solver import SolverGaveUp
from planner.schedule.plan import Plan
from planner.search.improve import improved
from planner.search.round_placements import hoped, rounded_candidate

_TO_SPARE = RateScale(h2d=0.94, d2h=0.94, cpu=0.94)  # for a second solution: whole tensors waste some of the rates
_NEAR = 0.025  # a plan this near to the solver's step or the bound ends the search


class Search:
    """A search for the fastest plan of one setting: the best of several candidate plans.

    `solved`: the integer program's solutions, where they are known already. Counts and gaps limit the search, never a
    clock. Where the integer program finds no step below `beat_s` seconds, little is tried. `bound_s`: a lower bound on
    the step in seconds.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        gap: float,
        beat_s: float,
        bound_s: float,
        solved: Sequence[Solution] = (),
    ) -> None:
        self.setting, self.gap, self.beat_s, self.bound_s = setting, gap, beat_s, bound_s
        self.solved = solved
        self.solutions: Sequence[Solution] = ()
        self.best_s = math.inf

    def best(self, least: Candidate) -> Plan:
        """Return the plan of the fastest candidate. `least`: a candidate that fits the budgets, so that there is at
        least one."""
        s = self.setting
        quick = sorted((evaluate(s, d) for d in candidates(s, lambda d: fits(d, s))), key=lambda seen: seen.step_s)
        # Of two equally fast plans the quick one comes first: the frugal one moves tensors needlessly.
        best = min((*quick[:1], evaluate(s, least)), key=lambda seen: seen.step_s)
        for seen in map(self._trailing, self._candidates(quick[:1])):
            if seen.candidate.source.startswith("o-ilp"):
                seen = self._improved(seen, min(best.step_s, seen.step_s))
            seen = self._ahead(seen)
            best = seen if seen.step_s < best.step_s else best
            self.best_s = best.step_s
            if best.step_s <= self._reach_s(best.step_s) * (1 + _NEAR):
                break
        return replace(
            proven(best.candidate, s),
            lp_step_s=self.solutions[0].step_s if self.solutions else 0.0,
            solver_gap=min(1.0, max((solution.gap for solution in self.solutions), default=1.0)),
        )

    def first(self) -> Plan | None:
        """Return the plan made from the better of the integer program's first two solutions; None where it has no
        solution below `beat_s` seconds, or none of them fits as whole tensors. It takes a fraction of the time of
        `best`, and the plan is nearly always as fast."""
        found = min(islice(self._candidates(()), 2), key=lambda seen: seen.step_s, default=None)
        if found is None:
            return None
        found = self._trailing(found)
        return proven(self._ahead(self._improved(found, found.step_s)).candidate, self.setting)

    def _improved(self, seen: Evaluation, best_s: float) -> Evaluation:
        """Return the evaluation improved until hardly more than the gap is left to gain."""
        return improved(self.setting, seen, (1 + self.gap) * self._reach_s(best_s), self._near_s())

    def _near_s(self) -> float:
        """Return the longest step in seconds that counts as near to the integer program's; 0 without a solution of
        it."""
        return (1 + _NEAR) * max(self.bound_s, self.solutions[0].step_s) if self.solutions else 0.0

    def _reach_s(self, best_s: float) -> float:
        """Return the shortest step in seconds that may be possible by all that is known; 0 without a solution of the
        integer program. Where a plan is faster than that program's solution, as happens with clipping, this is the
        proven bound."""
        if not self.solutions:
            return 0.0
        hope_s = self.solutions[0].step_s
        beaten = best_s < hope_s * (1 - self.gap)
        return self.bound_s if beaten else max(self.bound_s, hope_s)

    def _candidates(self, quick: Sequence[Evaluation]) -> Iterator[Evaluation]:
        """Yield the candidates rounded from the integer program's solutions; then one solved with lower rates, where
        whole tensors are still far from the program's step. Then, with clipping, the `quick` ones again, to try updates
        before the gradient norm is known on them."""
        with suppress(SolverGaveUp):
            self.solutions = self.solved or hoped(self.setting, gap=self.gap, below_s=self.beat_s)
        if self.beat_s < math.inf and (not self.solutions or self.solutions[0].step_s >= self.beat_s):
            return
        for solution in self.solutions:
            if solution.step_s < self.beat_s and (seen := self._rounded(solution, self.setting.budgets, "o-ilp")):
                yield seen
        spare = replace(self.setting.budgets, rate_scale=_TO_SPARE)
        enough = not self.solutions or self.best_s <= self._near_s()
        for solution in () if enough else hoped(replace(self.setting, budgets=spare), gap=self.gap)[:1]:
            if seen := self._rounded(solution, spare, "o-ilp with time to spare"):
                yield seen
        yield from quick if self._may_run_ahead() else ()

    def _may_run_ahead(self) -> bool:
        return self.setting.clip and self.setting.budgets.cpu_updates

    def _trailing(self, seen: Evaluation) -> Evaluation:
        """With clipping, return the candidate in which as many states on disk as make it fastest are updated only in
        the next step."""
        s = self.setting
        if not self._may_run_ahead():
            return seen
        ways = ways_to_trail(s.chain, seen.candidate, rounds=s.rounds, host_bytes=seen.host_bytes)
        return min([seen, *(evaluate(s, way) for way in ways)], key=lambda way: way.step_s)

    def _ahead(self, seen: Evaluation) -> Evaluation:
        """With clipping, return the candidate in which as many updates as make it fastest run before the gradient norm
        is known."""
        s = self.setting
        if not self._may_run_ahead():
            return seen
        ways = ahead_of_norm(s.chain, seen.candidate, rounds=s.rounds, host_bytes=seen.host_bytes)
        return min([seen, *(evaluate(s, way) for way in ways)], key=lambda way: way.step_s)

    def _rounded(self, solution: Solution, budgets: Budgets, source: str) -> Evaluation | None:
        setting = replace(self.setting, budgets=budgets)
        return rounded_candidate(setting, solution, gap=self.gap, source=source)

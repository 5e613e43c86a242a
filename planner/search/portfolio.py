"""The search for one problem's plan: candidates from the greedy algorithms and the O-ILP, each verified and simulated;
the fastest wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from planner.draft.draft import Draft, movable
from planner.draft.evaluate import Judge, host_bytes
from planner.draft.setting import FULL_PACE, Budgets, Pace, Setting
from planner.draft.update_ahead import ahead_of_norm
from planner.greedy.candidates import instant
from planner.ilp.instance import make_instance
from planner.ilp.program import Solution, solve_oilp, update_of_first_on_cpu, update_of_first_on_device
from planner.schedule.plan import Plan
from planner.search.anneal import shifted
from planner.search.critical_path import polished
from planner.search.restarts import improved
from planner.search.round_fates import rounded_draft
from planner.search.swap_decisions import exchanged

_TRIES = 2  # moves that hardly gain before the next candidate's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One way to ask the solver: see `Budgets`."""

    pace: Pace = FULL_PACE
    source: str


_VARIANTS = (
    _Variant(source="o-ilp"),
    _Variant(pace=Pace(h2d=0.94, d2h=0.94, cpu=0.94), source="o-ilp with time to spare"),
)
# Few tensors round badly, and few blocks are solved at once: more attempts.
_SHORT_BLOCKS = 24
_ATTEMPTS, _SHORT_ATTEMPTS = 8, 30  # to play a draft
_EXCHANGES, _EXCHANGE_SHIFTS = 300, 300  # of fates in a short chain, and of stages after each
_SHIFTS = 4000  # of stages where tensors are few
_NEAR = 0.02  # to the goal, where long chains get no other candidate
_FEW_TENSORS = 80  # more have too many stages to try


class Search:
    """The candidates of one problem and the best so far. The solver has `least_s` in any case, however late it is.
    Little is tried where it gets no step below `beat_s`; nothing gets one below `bound_s`."""

    def __init__(
        self, setting: Setting, deadline: float, least_s: float, gap: float, beat_s: float, bound_s: float
    ) -> None:
        self.setting, self.gap, self.deadline, self.beat_s, self.bound_s = setting, gap, deadline, beat_s, bound_s
        self.least_s = least_s
        self.short = len(setting.chain.blocks) <= _SHORT_BLOCKS
        self.few = self.short and sum(map(len, movable(setting.chain, setting.hardware))) <= _FEW_TENSORS
        # The clock of these tries knows neither the wait for the norm nor that copies slow the computing.
        self.shifts = self.few and not setting.clip and not setting.hardware.shared_compute
        self.judge = Judge(setting)
        self.solutions: list[Solution] = []

    def best(self, least: Draft) -> Plan:
        """The fastest of all candidates; `least` fits."""
        quick = sorted(instant(self.setting, self.judge.fits), key=lambda draft: self.judge.look(draft).step_s)
        chosen = quick[0] if quick else least
        # Of plans that take the same time the quick one: the frugal one moves what need not move.
        best = min((self.judge.proven(draft) for draft in (chosen, least)), key=lambda plan: plan.step_s)
        self.deadline = max(self.deadline, time.monotonic() + self.least_s)
        for draft in self._candidates(quick):
            if draft.source.startswith("o-ilp"):
                known_s = min(best.step_s, self.judge.look(draft).step_s)
                draft = self._improved(draft, self._goal_s(known_s))
            found = self.judge.proven(self._ahead(draft))
            if found.step_s < best.step_s:
                best, chosen = found, draft
            if best.step_s <= self._goal_s(best.step_s) * (1 + (0.0 if self.short else _NEAR)):
                break  # another candidate could hardly be better by more than that
        if self.short and self.solutions and self.setting.rounds == 1:
            found = self.judge.proven(self._ahead(self._exchanged(chosen, self._goal_s(best.step_s))))
            best = found if found.step_s < best.step_s else best
        solved = min(self.solutions, key=lambda solution: solution.step_s, default=None)
        return replace(
            best,
            lp_step_s=solved.step_s if solved else 0.0,
            solver_gap=min(1.0, max(solution.gap for solution in self.solutions)) if solved else 1.0,
        )

    def first(self) -> Plan | None:
        """What the better of the solver's first two answers comes to, None where neither helps: in a fraction of the
        time of `best`, and nearly always as good."""
        drafts = {self.judge.look(draft).step_s: draft for draft in islice(self._candidates(()), 2)}
        if not drafts:
            return None
        draft = self._improved(drafts[min(drafts)], self._goal_s(min(drafts)))
        return self.judge.proven(self._ahead(draft))

    def _goal_s(self, best_s: float) -> float:
        """A step that another candidate could hardly beat by more than the gap; 0 while the solver knows nothing. Where
        a plan has beaten the solver's stages, as happens with clipping, only the bound tells."""
        if not self.solutions:
            return 0.0
        hope_s = min(solution.step_s for solution in self.solutions)
        beaten = best_s < hope_s * (1 - self.gap)
        return (1 + self.gap) * (self.bound_s if beaten else max(self.bound_s, hope_s))

    def _candidates(self, quick: Sequence[Draft]) -> Iterator[Draft]:
        """The solver's; then, with clipping, the `quick` ones once more, for what running ahead of the norm makes of
        them: that takes longer than the solver needs."""
        if self._parts_the_first():
            yield from self._by_sides()
        for variant in _VARIANTS[bool(self.solutions) :]:
            left_s = self.deadline - time.monotonic()
            if left_s > 0 and (draft := self._solved(variant, left_s)) is not None:
                yield draft
        for draft in quick if self._may_run_ahead() else ():
            if time.monotonic() >= self.deadline:
                return
            yield draft

    def _may_run_ahead(self) -> bool:
        return self.setting.clip and self.setting.budgets.cpu_updates

    def _ahead(self, draft: Draft) -> Draft:
        """With clipping, the draft with as many updates ahead of the norm as make it fastest."""
        s = self.setting
        if not self._may_run_ahead():
            return draft
        ways = ahead_of_norm(s.chain, draft, rounds=s.rounds, host_bytes=s.budgets.cpu_bytes - host_bytes(draft, s))
        return min([draft, *ways], key=lambda way: self.judge.look(way).step_s)

    def _solved(self, variant: _Variant, time_limit_s: float) -> Draft | None:
        s = self.setting
        budgets = replace(s.budgets, pace=variant.pace)
        instance = make_instance(
            s.chain, s.hardware, budgets=budgets, slices=s.slices, clip=s.clip, rounds=s.rounds
        )  # fmt: skip
        solution = solve_oilp(instance, time_limit_s=time_limit_s, gap=self.gap)
        if solution is None:
            return None
        proves = variant.pace == FULL_PACE
        if proves:
            self.solutions.append(solution)
        if solution.step_s >= self.beat_s:
            if proves:
                self.deadline = time.monotonic()
            return None
        return self._rounded(solution, budgets, variant.source)

    def _parts_the_first(self) -> bool:
        """A long chain whose first block is one tensor that either side may update: the embedding, larger than a layer.
        A solver that parts it has a step that whole tensors are far from."""
        s = self.setting
        first = movable(s.chain, s.hardware)[0]
        return not self.short and s.budgets.cpu_updates and len(first) == 1 and first[0].trainable

    def _by_sides(self) -> Iterator[Draft]:
        """What the solver makes of it where the device updates the first block, and where the CPU does, the better one
        first. One of the two it is: together they prove what the program proves that parts it."""
        s, found = self.setting, []
        instance = make_instance(s.chain, s.hardware, budgets=s.budgets, slices=s.slices, clip=s.clip, rounds=s.rounds)
        for side in (update_of_first_on_device, update_of_first_on_cpu):
            left_s = self.deadline - time.monotonic()
            if left_s > 0 and (solution := solve_oilp(instance, time_limit_s=left_s, gap=self.gap, more=side)):
                found.append(solution)
        if len(found) == 2:  # else who knows whether the other one has no answer, or had no time for it
            self.solutions += found
        for solution in sorted(found, key=lambda solution: solution.step_s):
            if solution.step_s < self.beat_s and (draft := self._rounded(solution, s.budgets, "o-ilp")) is not None:
                yield draft

    def _rounded(self, solution: Solution, budgets: Budgets, source: str) -> Draft | None:
        s = self.setting
        return rounded_draft(
            s.chain, s.hardware, solution, budgets=budgets, slices=s.slices, clip=s.clip, rounds=s.rounds, gap=self.gap,
            time_limit_s=self.deadline - time.monotonic(), look=self.judge.look, source=source,
            along_flows=self.short or s.rounds > 1,
        )  # fmt: skip

    def _improved(self, draft: Draft, goal_s: float) -> Draft:
        """What playing the draft, and then a look at its timeline, make of it until it is as fast as `goal_s`."""
        s, go_on = self.setting, self._until(goal_s)
        if s.rounds == 1:
            attempts = _SHORT_ATTEMPTS if self.short else _ATTEMPTS
            draft = improved(s, draft, self.judge.look, attempts=attempts, go_on=go_on)
            draft = self._shifted(draft, _SHIFTS, go_on)
        *_, draft = (draft, *polished(s.chain, s.hardware, draft, self.judge.rating, tries=_TRIES, go_on=go_on))
        return draft

    def _shifted(self, draft: Draft, attempts: int, go_on: Callable[[float], bool]) -> Draft:
        """Where there are few tensors, the draft with other stages: of many each gains little and takes long."""
        if not self.shifts:
            return draft
        return shifted(self.setting, draft, self.judge.look, attempts=attempts, go_on=go_on)

    def _exchanged(self, draft: Draft, goal_s: float) -> Draft:
        """The draft with other fates of single tensors."""
        shifts = _EXCHANGE_SHIFTS if self.shifts else 0
        return exchanged(
            self.setting, draft, self.judge.look, attempts=_EXCHANGES, shifts=shifts, go_on=self._until(goal_s)
        )  # fmt: skip

    def _until(self, goal_s: float) -> Callable[[float], bool]:
        """Whether to go on from a step: until it is as fast as `goal_s`, or time is up."""
        return lambda step_s: step_s > goal_s and time.monotonic() < self.deadline

"""The planner: candidates from the greedy algorithms and the O-ILP; each verified and simulated, the fastest wins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.ahead import ahead_of_norm
from planner.bound import lower_bound_s
from planner.chain import Chain
from planner.errors import Exit, UserError
from planner.exchange import exchanged
from planner.greedy import Setting, frugal
from planner.hardware import Hardware
from planner.improve import Look, improved
from planner.instance import Budgets, make_instance
from planner.instant import instant
from planner.itinerary import Draft, assemble
from planner.memory import cpu_peak_bytes, gpu_peak_bytes, gpu_usage
from planner.oilp import Solution, solve_oilp
from planner.plan import Plan
from planner.polish import Rating, polished
from planner.program import Program, compile_program, order_program
from planner.rounding import rounded_draft
from planner.simulate import host_traffic_bytes, ordered_step_s, simulate
from planner.units import format_bytes
from planner.verify import verify

TIME_LIMIT_S = 30.0
GAP = 0.01
_HOPING = 1 / 3  # of the time, to see how many rounds promise most
_FIRST = 1 / 4  # of the time, at least, for the way that promises most
_TRIES = 2  # moves that hardly gain before the next candidate's turn


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The least device memory the planner can do with; `any_host_bytes` the same with unlimited host memory."""

    gpu_bytes: int
    any_host_bytes: int


def make_plan(
    chain: Chain,
    hardware: Hardware,
    *,
    gpu_budget_bytes: int,
    cpu_budget_bytes: int,
    slices: int,
    clip: bool,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = GAP,
    cpu_updates: bool = True,
    activation_offload: bool = True,
) -> Plan:
    """The fastest plan found within the budgets, with its prediction and its bounds. `slices` are those of the step,
    in as many rounds as is best.

    Raises UserError `budget-too-small` (exit 3), naming the least possible budget.
    """
    budgets = Budgets(
        gpu_bytes=gpu_budget_bytes, cpu_bytes=cpu_budget_bytes, cpu_updates=cpu_updates,
        activation_offload=activation_offload,
    )  # fmt: skip
    step = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)
    deadline = time.monotonic() + time_limit_s
    bounds_s = {setting.rounds: _bound_s(setting) for setting in in_rounds(step)}
    best: Plan | None = None
    beat_s = math.inf
    drafts = {setting: _frugal(setting) for setting in in_rounds(step)}
    ways = [setting for setting, least in drafts.items() if _peak_bytes(least, setting) <= gpu_budget_bytes]
    # There is a schedule of these: a proof that there is none comes from the solver's tolerances.
    bounds_s |= {s.rounds: 0.0 for s in ways if bounds_s[s.rounds] == math.inf}
    promising = _most_promising(ways, time_limit_s, gap)
    for setting in (way.setting for way in promising):
        if best is not None and (time.monotonic() >= deadline or bounds_s[setting.rounds] >= beat_s):
            continue
        until = deadline if best is not None else max(deadline, time.monotonic() + time_limit_s * _FIRST)
        found = _Search(setting, until, gap, beat_s, bounds_s[setting.rounds]).best(drafts[setting])
        if found.step_s < beat_s:
            best, beat_s = found, found.step_s * (1 - gap)
    if best is None:
        raise _too_small(step)
    others_s = (max(w.least_s, bounds_s[w.setting.rounds]) for w in promising if w.setting.rounds != best.rounds)
    to_others = 1 - min(others_s, default=math.inf) / best.lp_step_s if best.lp_step_s else 0.0
    solver_gap = max(best.solver_gap, to_others)  # another number of rounds might be faster
    return replace(best, bound_s=min(bounds_s.values()), solver_gap=solver_gap)


def least_budget(
    chain: Chain,
    hardware: Hardware,
    *,
    cpu_budget_bytes: int,
    slices: int,
    clip: bool,
    cpu_updates: bool = True,
    activation_offload: bool = True,
) -> LeastBudget:
    """The smallest device budget that `make_plan` accepts. Raises UserError when the host is too small for any."""

    def least(cpu_bytes: int) -> int:
        budgets = Budgets(
            gpu_bytes=0, cpu_bytes=cpu_bytes, cpu_updates=cpu_updates, activation_offload=activation_offload
        )
        step = Setting(chain=chain, hardware=hardware, budgets=budgets, slices=slices, clip=clip)
        return min(_peak_bytes(_frugal(setting), setting) for setting in in_rounds(step))

    return LeastBudget(gpu_bytes=least(cpu_budget_bytes), any_host_bytes=least(2**62))


def in_rounds(step: Setting) -> Iterator[Setting]:
    """The slices of a step in one round, in two, and so on: all ways to have rounds of equal size."""
    for rounds in range(1, step.slices + 1):
        if step.slices % rounds == 0:
            yield replace(step, rounds=rounds, slices=step.slices // rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A number of rounds: the step that the solver hopes for, and one that it proves to be out of reach."""

    setting: Setting
    hope_s: float = 0.0
    least_s: float = 0.0


def _most_promising(ways: list[Setting], time_limit_s: float, gap: float) -> list[_Way]:
    """The ways in order of what the solver hopes for: the time may not be enough to look into all of them. A round more
    must be worth the gap."""
    if len(ways) < 2:
        return [_Way(setting=setting) for setting in ways]
    found = []
    for number, s in enumerate(ways):
        budgets = replace(s.budgets, barrier=False)  # as the search asks first
        p = make_instance(s.chain, s.hardware, budgets=budgets, slices=s.slices, clip=s.clip, rounds=s.rounds)
        solution = solve_oilp(p, time_limit_s=time_limit_s * _HOPING / len(ways), gap=gap)
        hope_s = math.inf if solution is None else solution.step_s * (1 + gap) ** number
        least_s = 0.0 if solution is None else solution.step_s * (1 - solution.gap)
        found.append(_Way(setting=s, hope_s=hope_s, least_s=least_s))
    return sorted(found, key=lambda way: (way.hope_s, way.setting.rounds))


def predicted_step_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    """The simulated step, and not less than the host's memory takes for all transfers and CPU updates of a step."""
    return max(simulate(program, chain, hardware).step_s, _host_memory_s(program, chain, hardware))


def _host_memory_s(program: Program, chain: Chain, hardware: Hardware) -> float:
    return host_traffic_bytes(program, chain) / hardware.cpu_memory_bytes_per_s


def _assemble(draft: Draft, setting: Setting) -> Plan:
    return assemble(setting.chain, draft, slices=setting.slices, rounds=setting.rounds, clip=setting.clip)


def _peak_bytes(draft: Draft, setting: Setting) -> int:
    return gpu_peak_bytes(order_program(_assemble(draft, setting), setting.chain), setting.chain)


def _bound_s(s: Setting) -> float:
    return lower_bound_s(s.chain, s.hardware, budgets=s.budgets, slices=s.slices, clip=s.clip, rounds=s.rounds)


def _cpu_bytes(draft: Draft, setting: Setting) -> int:
    return cpu_peak_bytes(_assemble(draft, setting), setting.chain)


def _frugal(setting: Setting) -> Draft:
    draft = frugal(setting, lambda d: _peak_bytes(d, setting), lambda d: _cpu_bytes(d, setting))
    if draft is None:
        raise UserError(
            "No schedule fits this host memory budget.",
            code="host-memory-too-small",
            numbers=(f"budget {_format_down(setting.budgets.cpu_bytes)}",),
            hint="a larger --cpu-budget, or a smaller batch",
            exit_code=Exit.DOES_NOT_FIT,
        )
    return draft


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One way to ask the solver: see `Budgets`."""

    barrier: bool
    pace: float
    source: str


_VARIANTS = (
    _Variant(barrier=False, pace=1.0, source="o-ilp"),
    _Variant(barrier=False, pace=0.94, source="o-ilp with time to spare"),
)
# Few tensors round badly, and few blocks are solved at once: more attempts.
_SHORT_BLOCKS = 24
_ATTEMPTS, _SHORT_ATTEMPTS = 8, 30  # to play a draft
_EXCHANGES = 300  # of fates in a short chain
_NEAR = 0.02  # to the goal, where long chains get no other candidate
_SHORT_VARIANTS = (
    _Variant(barrier=True, pace=1.0, source="o-ilp with barriers"),
    _Variant(barrier=True, pace=0.94, source="o-ilp with time to spare, with barriers"),
    _Variant(barrier=False, pace=0.85, source="o-ilp with much time to spare"),
)


class _Search:
    """The candidates of one problem and the best so far. Little is tried where the solver gets no step below
    `beat_s`; nothing gets one below `bound_s`."""

    def __init__(self, setting: Setting, deadline: float, gap: float, beat_s: float, bound_s: float) -> None:
        self.setting, self.gap, self.deadline, self.beat_s, self.bound_s = setting, gap, deadline, beat_s, bound_s
        self.short = len(setting.chain.blocks) <= _SHORT_BLOCKS
        self.solutions: list[Solution] = []

    def best(self, least: Draft) -> Plan:
        """The fastest of all candidates; `least` fits."""
        quick = sorted(instant(self.setting, self._fits), key=lambda draft: self._look(draft).step_s)
        chosen = quick[0] if quick else least
        best = min((self._proven(draft) for draft in (least, chosen)), key=lambda plan: plan.step_s)
        for draft in self._candidates(quick):
            if draft.source.startswith("o-ilp"):
                known_s = min(best.step_s, self._look(draft).step_s)
                draft = self._improved(draft, self._goal_s(known_s))
            found = self._proven(self._ahead(draft))
            if found.step_s < best.step_s:
                best, chosen = found, draft
            if best.step_s <= self._goal_s(best.step_s) * (1 + (0.0 if self.short else _NEAR)):
                break  # another candidate could hardly be better by more than that
        if self.short and self.solutions and self.setting.rounds == 1:
            found = self._proven(self._ahead(self._exchanged(chosen, self._goal_s(best.step_s))))
            best = found if found.step_s < best.step_s else best
        solved = min(self.solutions, key=lambda solution: solution.step_s, default=None)
        return replace(
            best,
            lp_step_s=solved.step_s if solved else 0.0,
            solver_gap=min(1.0, solved.gap) if solved else 1.0,
        )

    def _goal_s(self, best_s: float) -> float:
        """A step that another candidate could hardly beat by more than the gap; 0 while the solver knows nothing. Where
        a plan has beaten the solver's stages, as happens with clipping, only the bound tells."""
        if not self.solutions:
            return 0.0
        hope_s = max(solution.step_s for solution in self.solutions)
        beaten = best_s < hope_s * (1 - self.gap)
        return (1 + self.gap) * (self.bound_s if beaten else max(self.bound_s, hope_s))

    def _candidates(self, quick: Sequence[Draft]) -> Iterator[Draft]:
        """The solver's; then, with clipping, the `quick` ones once more, for what running ahead of the norm makes of
        them: that takes longer than the solver needs."""
        for variant in (*_VARIANTS, *(_SHORT_VARIANTS if self.short else ())):
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
        ways = ahead_of_norm(s.chain, draft, rounds=s.rounds, host_bytes=s.budgets.cpu_bytes - _cpu_bytes(draft, s))
        return min([draft, *ways], key=lambda way: self._look(way).step_s)

    def _solved(self, variant: _Variant, time_limit_s: float) -> Draft | None:
        s = self.setting
        budgets = replace(s.budgets, barrier=variant.barrier, pace=variant.pace)
        instance = make_instance(
            s.chain, s.hardware, budgets=budgets, slices=s.slices, clip=s.clip, rounds=s.rounds
        )  # fmt: skip
        solution = solve_oilp(instance, time_limit_s=time_limit_s, gap=self.gap)
        if solution is None:
            return None
        if variant.pace == 1.0 and not variant.barrier:  # the others prove nothing
            self.solutions.append(solution)
        if solution.step_s >= self.beat_s:
            self.deadline = time.monotonic()
            return None
        return rounded_draft(
            s.chain, s.hardware, solution, budgets=budgets, slices=s.slices, clip=s.clip, rounds=s.rounds, gap=self.gap,
            time_limit_s=time_limit_s, look=self._look, source=variant.source, along_flows=self.short or s.rounds > 1,
        )  # fmt: skip

    def _improved(self, draft: Draft, goal_s: float) -> Draft:
        """What playing the draft, and then a look at its timeline, make of it until it is as fast as `goal_s`."""
        s, go_on = self.setting, self._until(goal_s)
        if s.rounds == 1:
            attempts = _SHORT_ATTEMPTS if self.short else _ATTEMPTS
            draft = improved(s, draft, self._look, attempts=attempts, go_on=go_on)
        *_, draft = (draft, *polished(s.chain, s.hardware, draft, self._rating, tries=_TRIES, go_on=go_on))
        return draft

    def _exchanged(self, draft: Draft, goal_s: float) -> Draft:
        """The draft with other fates of single tensors."""
        return exchanged(self.setting, draft, self._look, attempts=_EXCHANGES, go_on=self._until(goal_s))

    def _until(self, goal_s: float) -> Callable[[float], bool]:
        """Whether to go on from a step: until it is as fast as `goal_s`, or time is up."""
        return lambda step_s: step_s > goal_s and time.monotonic() < self.deadline

    def _fits(self, draft: Draft) -> bool:
        s = self.setting
        plan = _assemble(draft, s)
        if cpu_peak_bytes(plan, s.chain) > s.budgets.cpu_bytes:
            return False
        return gpu_peak_bytes(order_program(plan, s.chain), s.chain) <= s.budgets.gpu_bytes

    def _look(self, draft: Draft) -> Look:
        s = self.setting
        plan = _assemble(draft, s)
        program = order_program(plan, s.chain)
        step_s = ordered_step_s(program, s.chain, s.hardware)
        return Look(
            plan=plan, room_bytes=self._room_bytes(plan, program),
            host_bytes=s.budgets.cpu_bytes - cpu_peak_bytes(plan, s.chain),
            step_s=max(step_s, _host_memory_s(program, s.chain, s.hardware)),
        )  # fmt: skip

    def _room_bytes(self, plan: Plan, program: Program) -> list[int]:
        """Per stage, what the budget leaves free."""
        order = {stage.name: number for number, stage in enumerate(plan.stages)}
        room = [self.setting.budgets.gpu_bytes] * len(order)
        for usage in gpu_usage(program, self.setting.chain):
            number = order[usage.op.stage]
            room[number] = min(room[number], self.setting.budgets.gpu_bytes - usage.peak_bytes)
        return room

    def _rating(self, draft: Draft) -> Rating:
        s = self.setting
        plan = _assemble(draft, s)
        program = compile_program(plan, s.chain)
        return Rating(
            plan=plan, program=program, step_s=predicted_step_s(program, s.chain, s.hardware),
            room_bytes=self._room_bytes(plan, program),
        )  # fmt: skip

    def _proven(self, draft: Draft) -> Plan:
        """The plan with its prediction. One that `verify` rejects is our bug: InvalidProgram."""
        s = self.setting
        rating = self._rating(draft)
        verify(rating.program, s.chain, gpu_budget_bytes=s.budgets.gpu_bytes)
        return replace(
            rating.plan,
            step_s=rating.step_s,
            gpu_peak_bytes=s.budgets.gpu_bytes - min(rating.room_bytes),
            cpu_peak_bytes=cpu_peak_bytes(rating.plan, s.chain),
            gpu_budget_bytes=s.budgets.gpu_bytes,
            cpu_budget_bytes=s.budgets.cpu_bytes,
        )


def _too_small(setting: Setting) -> UserError:
    budgets = setting.budgets
    least = least_budget(
        setting.chain, setting.hardware, cpu_budget_bytes=budgets.cpu_bytes, slices=setting.slices, clip=setting.clip,
        cpu_updates=budgets.cpu_updates, activation_offload=budgets.activation_offload,
    )  # fmt: skip
    numbers = [f"budget {_format_down(budgets.gpu_bytes)}, least possible {format_bytes(least.gpu_bytes)}"]
    if least.any_host_bytes < least.gpu_bytes:
        numbers.append(
            f"host budget {_format_down(budgets.cpu_bytes)}; "
            f"with more host memory least possible {format_bytes(least.any_host_bytes)}"
        )
    least_text = round_up(least.gpu_bytes)
    return UserError(
        "No schedule fits this memory budget.",
        code="budget-too-small",
        numbers=tuple(numbers),
        hint=f"give --gpu-budget {least_text} or, in the job file, gpu_budget: {least_text}",
        exit_code=Exit.DOES_NOT_FIT,
    )


def _format_down(count: int) -> str:
    """A budget as people read it, rounded down, so that it never looks as large as the least possible one."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            tenths = count * 10 // factor
            return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{count} B"


def round_up(count: int) -> str:
    """A size that `parse_bytes` reads as at least `count` bytes: "8GiB", "700MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 4 * factor:
            return f"{-(-count // factor)}{unit}"
    return str(count)

"""Finds the fastest plan within memory budgets, in the best number of rounds, and the least possible budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planner.arrange.pack import arranged_bytes, with_places
from planner.candidate.candidate import Candidate
from planner.candidate.evaluate import assembled, device_bytes, host_bytes, proven
from planner.candidate.setting import Setting
from planner.errors import Exit, UserError
from planner.garbage import seldom_collected
from planner.greedy.streaming import frugal, profile
from planner.ilp.lower_bound import lower_bound_s
from planner.ilp.narrow import narrowed
from planner.ilp.program import Solution
from planner.ilp.solver import SolverGaveUp
from planner.schedule.compile import order_program
from planner.schedule.plan import Plan
from planner.search.portfolio import Search
from planner.search.round_placements import REMEMBERED, hoped
from planner.units import format_bytes, format_bytes_down

GAP = 0.01
_LOST = 32  # 1/32 of the budget is reserved for gaps between tensors; mostly they are smaller
_TRIES = 3  # plans; each further one reserves more for gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBudget:
    """The least bytes of GPU memory for which there is a plan: with the given host memory (`gpu_bytes`), and with
    unlimited host memory (`any_host_bytes`)."""

    gpu_bytes: int
    any_host_bytes: int


@seldom_collected()
def make_plan(step: Setting, *, gap: float = GAP) -> Plan:
    """Return the fastest plan found within the budgets, with its predicted step time and the lower bound on it.

    `step` has all micro-batches of a step in one round, a forward and backward through the model; the plan has as many
    rounds as is best. `gap`: how much slower than the optimum a solution of the integer program may be, as a share of
    the time. Where the chain says which tensors each block allocates (`lifetimes`), tensors get addresses in GPU
    memory, and bytes lost between them count against the budget.

    Raises UserError `budget-too-small` (exit 3), which names the least possible budget, or `host-memory-too-small`.
    """
    plan = _arranged(step, gap) if step.chain.lifetimes else _fastest(step, gap)
    if plan is None:
        raise too_small(step)
    return plan


def _arranged(step: Setting, gap: float) -> Plan | None:
    """Return the fastest plan found whose tensors, each at an address, fit the GPU budget; None where there is none.
    How many bytes are lost between tensors is known only once there is a plan. Where they are more than was reserved,
    the next plan gets a budget that is smaller by the excess."""
    budget_bytes = step.budgets.gpu_bytes
    use_bytes = without_loss(budget_bytes)
    for _ in range(_TRIES):
        plan = _fastest(_within(step, use_bytes), gap)
        if plan is None:
            break
        its_bytes = plan.gpu_peak_bytes
        plan = replace(with_places(plan, step.chain), gpu_budget_bytes=budget_bytes)
        if plan.gpu_peak_bytes <= budget_bytes:
            return plan
        lost_bytes = plan.gpu_peak_bytes - its_bytes
        use_bytes = budget_bytes - lost_bytes - budget_bytes // _LOST // 4
    frugal_way = _most_frugal(step)
    if frugal_way is None or device_bytes(*frugal_way) > budget_bytes:
        return None
    candidate, setting = frugal_way
    plan = with_places(proven(candidate, setting), step.chain)
    bound_s = min(map(bound_of, in_rounds(step)))
    if plan.gpu_peak_bytes > budget_bytes:
        return None
    return replace(plan, solver_gap=1.0, bound_s=bound_s)


def without_loss(budget_bytes: int) -> int:
    """Return how many bytes of a GPU memory budget tensors can use if each has a fixed address, as the gaps between
    them take the rest. In rare cases the gaps take more."""
    return budget_bytes - budget_bytes // _LOST


def for_tensors(step: Setting) -> Setting:
    """Return the step with the GPU memory budget that tensors can use: `make_plan` begins with this one."""
    return _within(step, without_loss(step.budgets.gpu_bytes)) if step.chain.lifetimes else step


def _within(step: Setting, gpu_bytes: int) -> Setting:
    return replace(step, budgets=replace(step.budgets, gpu_bytes=gpu_bytes))


def _fastest(step: Setting, gap: float) -> Plan | None:
    """Return the fastest plan found, counting the bytes of tensors but not the gaps between their addresses; None where
    nothing fits."""
    best: Plan | None = None
    beat_s = math.inf
    ways = ways_of(step, gap=gap)
    for way in ways:
        # Where the program has no solution in any number of rounds, its answer says nothing about the others.
        hope_s = way.hope_s if way.hope_s < math.inf else 0.0
        if best is not None and max(hope_s, way.bound_s) >= beat_s:
            continue
        setting, _ = narrowed_to(way.setting, way.least)
        found = Search(setting, gap=gap, beat_s=beat_s, bound_s=way.bound_s, solved=way.solved).best(way.least)
        if best is None or found.step_s < best.step_s:
            best, beat_s = found, found.step_s * (1 - gap)
    if best is None:
        return None
    others_s = (way.least_s for way in ways if way.setting.rounds != best.rounds)
    to_others = 1 - min(others_s, default=math.inf) / best.lp_step_s if best.lp_step_s else 0.0
    solver_gap = max(best.solver_gap, to_others)  # another number of rounds might be faster
    bound_s = min([*(way.bound_s for way in ways), *map(bound_of, in_rounds(step))])
    return replace(best, bound_s=bound_s, solver_gap=solver_gap)


def least_budget(step: Setting) -> LeastBudget:
    """Return the least GPU memory budget that `make_plan` accepts, whatever the GPU budget of `step` is. Raises
    UserError where the host's memory is too small for any plan."""
    any_host = replace(step, budgets=replace(step.budgets, cpu_bytes=2**62))
    return LeastBudget(gpu_bytes=least_gpu_bytes(step), any_host_bytes=least_gpu_bytes(any_host))


def least_gpu_bytes(step: Setting, *, enough: int = 0, rounds: int | None = None) -> int:
    """Return the least GPU memory in bytes for which there is a plan with the host budget of `step`, or the first
    amount found that is at most `enough`. `rounds`: the number of rounds in which the plan runs a step's micro-batches;
    None: any. Raises UserError where the host's memory is too small for any plan."""
    found = _most_frugal(step, enough=enough, rounds=rounds)
    if found is None:
        raise _host_too_small(step)
    candidate, setting = found
    if not step.chain.lifetimes:
        return device_bytes(candidate, setting)
    return arranged_bytes(order_program(assembled(candidate, setting), step.chain), step.chain)


def rounds_of_least(step: Setting) -> int | None:
    """Return in how many rounds a step needs the least GPU memory; None where the host's memory is too small for any
    plan. A round is a forward and backward of a share of the step's micro-batches."""
    found = _most_frugal(step)
    return found and found[1].rounds


def _most_frugal(step: Setting, *, enough: int = 0, rounds: int | None = None) -> tuple[Candidate, Setting] | None:
    """Return the candidate that needs the fewest bytes on the device within the host budget, or the first one found
    that needs at most `enough`; None where the host is too small for any."""
    best: tuple[int, Candidate, Setting] | None = None
    for setting in (s for small in _small_tensors(step) for s in in_rounds(small) if rounds in (None, s.rounds)):
        candidate = _frugal(setting)
        size = device_bytes(candidate, setting) if candidate is not None else 0
        if candidate is not None and (best is None or size < best[0]):
            best = size, candidate, setting
            if size <= enough - enough // _LOST * bool(step.chain.lifetimes):
                break
    return best and best[1:]


@functools.lru_cache(REMEMBERED)
def rounds_that_fit(step: Setting) -> Mapping[Setting, Candidate]:
    """Return, for each number of rounds in which a plan fits the budgets, the setting of that plan and the candidate
    plan that needs the least GPU memory. A round is a forward and backward of a share of the step's micro-batches.
    Tensors too small to be worth a transfer stay on the device, unless nothing fits then."""
    for small in _small_tensors(step):
        candidates = {setting: _frugal(setting) for setting in in_rounds(small)}
        found = {s: d for s, d in candidates.items() if d and device_bytes(d, s) <= step.budgets.gpu_bytes}
        if found:
            return found
    return {}


def _small_tensors(step: Setting) -> list[Setting]:
    """Return the step as it is and, where some tensors are too small to be worth a transfer, also the step in which
    these may leave the device."""
    least = step.hardware.min_transfer_bytes
    free = replace(step, hardware=replace(step.hardware, min_transfer_bytes=0))
    return [step, free] if any(t.bytes < least or 0 < t.state_bytes < least for t in step.chain.tensors()) else [step]


def in_rounds(step: Setting) -> Iterator[Setting]:
    """Yield the step with its micro-batches in one round (a forward and backward through the model), in two and so on,
    for all numbers of rounds that give rounds of equal size."""
    for rounds in range(1, step.slices + 1):
        if step.slices % rounds == 0:
            yield replace(step, rounds=rounds, slices=step.slices // rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A number of rounds in which a plan fits: its setting, and the candidate plan that needs the least GPU memory.

    `bound_s`: a lower bound in seconds on the step of any schedule. `least_s`: one on the integer program's step.
    `solved`: the program's solutions; none where it was not solved, or where no step is short enough. `hope_s`: the
    step of the best solution; where there is none, the step that another number of rounds has, or infinity.
    """

    setting: Setting
    least: Candidate
    bound_s: float
    least_s: float
    hope_s: float
    solved: tuple[Solution, ...]


@functools.lru_cache(REMEMBERED)
def ways_of(step: Setting, *, gap: float, below_s: float = math.inf) -> tuple[Way, ...]:
    """Return the numbers of rounds in which a plan fits, the most promising first. The integer program is solved for
    one after the other, in the order of their lower bounds. After the first, only steps are looked for that are shorter
    than the best so far by more than `gap`, and nothing is solved where the bound says that there are none. `below_s`:
    from the beginning, only steps of fewer seconds are looked for."""
    ways: list[Way] = []
    best_s = below_s
    candidates = rounds_that_fit(step)
    # A schedule is known for these, so a proof that there is none comes only from the solver's tolerances.
    bounds_s = {setting: 0.0 if bound_of(setting) == math.inf else bound_of(setting) for setting in candidates}
    for setting in sorted(candidates, key=lambda setting: bounds_s[setting]):
        bound_s, least = bounds_s[setting], candidates[setting]
        solved: tuple[Solution, ...] = ()
        least_s = bound_s
        if bound_s < below_s:
            few, relaxed_s = narrowed_to(setting, least)
            try:
                solved = hoped(few, gap=gap, below_s=below_s) if relaxed_s < below_s else ()
            except SolverGaveUp:
                least_s = max(bound_s, relaxed_s)
            else:
                if solved:
                    # The other side of the embedding's update may have been excluded by `below_s` alone.
                    least_s = max(bound_s, min(below_s, *(found.step_s * (1 - found.gap) for found in solved)))
                    best_s = min(best_s, solved[0].step_s)
                elif below_s < math.inf:
                    least_s = below_s
            below_s = min(below_s, best_s * (1 - gap))
        hope_s = solved[0].step_s if solved else max(best_s, bound_s)
        ways.append(Way(setting=setting, least=least, bound_s=bound_s, least_s=least_s, hope_s=hope_s, solved=solved))
    return tuple(sorted(ways, key=lambda way: (way.hope_s, not way.solved)))


@functools.lru_cache(REMEMBERED)
def narrowed_to(setting: Setting, least: Candidate) -> tuple[Setting, float]:
    """Return the setting with only those options of blocks that are worth deciding among, and a lower bound in seconds
    on the integer program's step."""
    return narrowed(setting, least.options, profile(setting, "fast"))


@functools.lru_cache(REMEMBERED)
def bound_of(s: Setting) -> float:
    """Return a lower bound in seconds on the step: no schedule in the number of rounds of `s` is faster, whatever it
    moves. Where some optimizer states are on disk, the bound holds for any choice of these states."""
    stored = any(t.states_on_disk for t in s.chain.tensors())
    return lower_bound_s(replace(_small_tensors(s)[-1], states_anywhere=stored))


def _frugal(setting: Setting) -> Candidate | None:
    return _frugal_on_host(_within(setting, 0))


@functools.lru_cache(REMEMBERED)
def _frugal_on_host(setting: Setting) -> Candidate | None:
    """Return the candidate that needs the fewest bytes on the device, whose budget does not matter."""
    return frugal(setting, lambda d: device_bytes(d, setting), lambda d: host_bytes(d, setting))


def _host_too_small(setting: Setting) -> UserError:
    return UserError(
        "No schedule fits this host memory budget.",
        code="host-memory-too-small",
        numbers=(f"budget {format_bytes_down(setting.budgets.cpu_bytes)}",),
        hint=f"{_meant(setting)}a larger --cpu-budget, or a smaller batch",
        exit_code=Exit.DOES_NOT_FIT,
    )


def too_small(setting: Setting) -> UserError:
    """Return the error for budgets that no schedule fits, with the least possible GPU budget. Raises UserError
    `host-memory-too-small` where the host's memory is too small however much the GPU has."""
    budgets = setting.budgets
    least = least_budget(setting)
    numbers = [f"budget {format_bytes_down(budgets.gpu_bytes)}, least possible {format_bytes(least.gpu_bytes)}"]
    if least.any_host_bytes < least.gpu_bytes:
        numbers.append(
            f"host budget {format_bytes_down(budgets.cpu_bytes)}; "
            f"with more host memory least possible {format_bytes(least.any_host_bytes)}"
        )
    least_text = round_up(least.gpu_bytes)
    return UserError(
        "No schedule fits this memory budget.",
        code="budget-too-small",
        numbers=tuple(numbers),
        hint=f"{_meant(setting)}give --gpu-budget {least_text} or, in the job file, gpu_budget: {least_text}",
        exit_code=Exit.DOES_NOT_FIT,
    )


def _meant(setting: Setting) -> str:
    """Return a question such as "did you mean 8GB?" for a budget of so few bytes that its unit must have been
    forgotten; "" for other budgets."""
    model_bytes = sum(tensor.bytes + tensor.state_bytes for tensor in setting.chain.tensors())
    for key, budget in (("gpu_budget", setting.budgets.gpu_bytes), ("cpu_budget", setting.budgets.cpu_bytes)):
        if 0 < budget < 2**18 and model_bytes >= 2**20:  # 2^18 MB would be 256 GB
            meant = f"{budget}{'GB' if budget < 1000 else 'MB'}"
            return f"{key} is {budget} bytes, as a number without a unit counts bytes: did you mean {meant}? Else "
    return ""


def round_up(count: int) -> str:
    """Return a size as text that `parse_bytes` reads as at least `count` bytes: "8GiB", "700MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 4 * factor:
            return f"{-(-count // factor)}{unit}"
    return str(count)

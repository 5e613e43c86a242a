"""Makes candidates without a solver: some at once, and the one with the least device memory, which gives the least
possible budget.

Profiles choose an option for each block: "fast" the quickest without transfers of activations, "recompute" the one that
keeps or moves the fewest bytes, "offload" the one with the most bytes on the host. Kinds of candidates: "resident" has
everything on the device. "streamed" fetches each weight one stage before its use and releases it after, with the update
on the CPU (L2L). "exposed" is the same, but fetches in the very stage that reads the weight: slow, and with the least
memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from planner.candidate.candidate import (
    Absence,
    Candidate,
    Side,
    TensorSchedule,
    at_home,
    backward_stage,
    movable,
    settled,
)
from planner.candidate.setting import Setting
from planner.schedule.chain import Block, Option, Tensor
from planner.schedule.peak_moments import kept_bytes, moments
from planner.units import counted

_T = TypeVar("_T")
PROFILES = ("fast", "recompute", "offload")


def profile(setting: Setting, name: str) -> list[str]:
    """Return, for each block, the name of the option that the profile `name` (one of `PROFILES`) chooses. An option
    says which activations a block keeps, offloads or recomputes."""
    return [_pick(setting.options(block), block, name).name for block in setting.chain.blocks]


def _pick(options: Sequence[Option], block: Block, name: str) -> Option:
    def time_s(option: Option) -> float:
        return option.forward_s + option.backward_s

    if name == "offload":
        return max(options, key=lambda o: (o.offloaded_bytes, -kept_bytes(block, o), -time_s(o)))
    still = [o for o in options if not o.offloaded_bytes] or options
    if name == "recompute":
        return min(still, key=lambda o: (kept_bytes(block, o), time_s(o)))
    return min(still, key=lambda o: (time_s(o), kept_bytes(block, o)))


def streamed(
    setting: Setting,
    options: Sequence[str],
    *,
    ahead: bool,
    at_home_names: frozenset[str] = frozenset(),
    gpu_updated: frozenset[str] = frozenset(),
    source: str,
) -> Candidate:
    """Return the candidate plan in which each tensor that may leave the device is away between its uses, except those
    in `at_home_names`. The CPU updates these tensors, except those in `gpu_updated`. `options`: for each block, the
    name of the option that says which activations it keeps.

    `ahead`: a tensor is fetched in the stage before the one that reads it, and its gradient is released in the stage
    after the one that makes it. Otherwise both happen in the very same stage, and the device waits.
    """
    chain, clip = setting.chain, setting.clip
    free = {
        tensor.name: index
        for index, tensors in enumerate(movable(chain, setting.hardware))
        for tensor in tensors
        if tensor.name not in at_home_names
    }
    staying = {t.name for tensors in settled(chain, setting.hardware) for t in tensors} - at_home_names

    def schedule(tensor: Tensor) -> TensorSchedule:
        if tensor.name in free:
            return _stream(setting, tensor, free[tensor.name], ahead, on_gpu=tensor.name in gpu_updated)
        home = at_home(chain, tensor, clip)
        return replace(home, states=_states_absence(home, ahead)) if tensor.name in staying else home

    return Candidate(options=tuple(options), schedules=tuple(map(schedule, chain.tensors())), source=source)


def _states_absence(schedule: TensorSchedule, ahead: bool) -> tuple[Absence, ...]:
    assert schedule.update is not None
    return (Absence(evict=schedule.update, prefetch=schedule.update - ahead, offload=schedule.update),)


def _stream(setting: Setting, tensor: Tensor, block: int, ahead: bool, *, on_gpu: bool = False) -> TensorSchedule:
    chain, clip = setting.chain, setting.clip
    backward, stages = backward_stage(chain, block), 2 * len(chain.blocks) - 1
    lead = 1 if ahead else 0
    side = Side.NOBODY
    if tensor.trainable:
        # Block 0's forward would wait for its update: less memory, more time.
        able = block > 0 or (setting.rounds == 1 and not ahead)
        side = Side.CPU if setting.budgets.cpu_updates and able and not on_gpu else Side.GPU
    if side is Side.GPU and clip and block > 0:  # the update waits for the norm, with all its data on the device
        return at_home(chain, tensor, clip)
    absences: list[Absence] = []
    fetch = backward - lead if setting.rounds > 1 else None
    # With the update on the device the host's copy is taken at the update, in time for both absences.
    offload = backward if side is Side.GPU else None
    after_forward = Absence(evict=block, prefetch=backward - lead, offload=offload if block == 0 else None)
    if block < len(chain.blocks) - 1 and after_forward.prefetch > block + 1:
        absences.append(after_forward)
    after_backward = Absence(evict=backward, prefetch=max(0, block - lead), offload=offload)
    if block > 0 or side is Side.CPU:
        absences.append(after_backward)
    if side is Side.CPU:
        update = stages - 1 if clip else min(backward + 1, stages - 1)  # once the stale weight is gone
        drop = min(backward + lead, stages - 1)
        return TensorSchedule(
            tensor=tensor, side=side, update=update, send=backward, drop=drop, fetch=fetch, weight=tuple(absences)
        )
    if side is Side.GPU:
        updated = TensorSchedule(tensor=tensor, side=side, update=backward, weight=tuple(absences))
        updated = replace(updated, states=_states_absence(updated, ahead))
        return replace(updated, send=backward, drop=backward, fetch=fetch) if setting.rounds > 1 else updated
    return TensorSchedule(tensor=tensor, side=side, weight=tuple(absences))


def resident(setting: Setting, options: Sequence[str], source: str) -> Candidate:
    """Return the candidate plan with all weights, gradients and optimizer states on the device all the time. `options`:
    for each block, the name of the option that says which activations it keeps."""
    schedules = tuple(at_home(setting.chain, tensor, setting.clip) for tensor in setting.chain.tensors())
    return Candidate(options=tuple(options), schedules=schedules, source=source)


def candidates(setting: Setting, fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    """Yield candidate plans that fit and take no solver: all tensors resident on the device, all streamed, and streamed
    with as many blocks resident as fit. The final plan is never slower than these."""
    for name in PROFILES:
        options = profile(setting, name)
        plan = resident(setting, options, f"resident, {name}")
        if fits(plan):
            yield plan
        plan = streamed(setting, options, ahead=True, source=f"streamed, {name}")
        if fits(plan):
            yield plan
            yield from _filled(setting, options, name, fits)


def _filled(
    setting: Setting, options: Sequence[str], name: str, fits: Callable[[Candidate], bool]
) -> Iterator[Candidate]:
    """Yield the streamed candidate with as many blocks resident as fit, counted from the head down; none where not even
    one fits."""
    tensors = movable(setting.chain, setting.hardware)

    def plan_of(count: int) -> Candidate:
        names = frozenset(t.name for block in tensors[len(tensors) - count :] for t in block)
        source = f"{counted(count, 'block')} at home, {name}"
        return streamed(setting, options, ahead=True, at_home_names=names, source=source)

    low, high = 0, len(tensors)  # low fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(plan_of(middle)) else (low, middle)
    if low:
        yield plan_of(low)


def frugal(
    setting: Setting, peak_bytes: Callable[[Candidate], int], cpu_bytes: Callable[[Candidate], int]
) -> Candidate | None:
    """Return the candidate plan with the least device memory whose host memory fits the budget; None where the host is
    too small for any. `peak_bytes` and `cpu_bytes` give a candidate's bytes on device and host.

    Weights come in the stage that reads them. Each block has the option that keeps the fewest bytes, of those whose own
    peak is within a limit; the limit is the lowest at which each block has such an option.
    """
    least, recompute = tuple(_least_options(setting)), tuple(profile(setting, "recompute"))
    plans = [
        streamed(setting, options, ahead=False, source="frugal")
        for options in dict.fromkeys((least, recompute, tuple(profile(setting, "offload"))))
    ]
    plans += [resident(setting, options, "frugal, resident") for options in dict.fromkeys((least, recompute))]
    if (stored := _on_disk(setting, least)) is not None:
        plans.append(streamed(setting, stored, ahead=False, source="frugal, activations on disk"))
    plans += _less_on_host(setting, least, cpu_bytes)
    best: tuple[int, Candidate] | None = None
    for plan in plans:
        if cpu_bytes(plan) <= setting.budgets.cpu_bytes and (best is None or _always_there(plan) < best[0]):
            size = peak_bytes(plan)
            best = (size, plan) if best is None or size < best[0] else best
    return best and best[1]


def _always_there(candidate: Candidate) -> int:
    """The bytes of the weights and optimizer states that never leave the device."""
    weights = sum(s.tensor.bytes for s in candidate.schedules if not s.weight)
    return weights + sum(s.tensor.state_bytes for s in candidate.schedules if s.side is Side.GPU and not s.states)


def _on_disk(setting: Setting, names: Sequence[str]) -> list[str] | None:
    """Return the options `names` with activations on disk where they leave the device; None where none can be there, or
    the disk has no room for all of them."""
    chain, options, stored = setting.chain, list(names), 0
    for i, (block, name) in enumerate(zip(chain.blocks, names, strict=True)):
        option = block.option(name)
        twin = next((o for o in block.options if o.on_disk and o.recipe == option.recipe), None)
        if twin is not None:
            options[i], stored = twin.name, stored + twin.stored_bytes * setting.slices * setting.rounds
    return options if 0 < stored <= setting.hardware.disk_bytes else None


def _less_on_host(setting: Setting, least: Sequence[str], cpu_bytes: Callable[[Candidate], int]) -> list[Candidate]:
    """Return streamed candidates that need less host memory, each changed as little as is enough, in one of three ways:
    the options `least`, but some blocks without offloaded activations; no offloaded activations and some tensors
    resident; or none and some updates on the device, which need no gradient on the host."""
    options = profile(setting, "recompute")
    free = [t for block in movable(setting.chain, setting.hardware) for t in block]
    # Tensors with states on disk come last, because moving them frees no host memory. Tensors wholly on disk are left
    # out: with updates on the device they would never leave it.
    order = sorted((t for t in free if not t.wholly_on_disk), key=lambda t: t.states_on_disk)
    last_first = [t for on_disk in (False, True) for t in reversed(free) if t.states_on_disk == on_disk]

    def at_home_plan(count: int) -> Candidate:
        names = frozenset(t.name for t in last_first[:count])
        return streamed(setting, options, ahead=False, at_home_names=names, source="frugal, host full")

    def gpu_updated_plan(count: int) -> Candidate:
        names = frozenset(t.name for t in order[:count])  # the head last: its states would be there beside its loss
        return streamed(setting, options, ahead=False, gpu_updated=names, source="frugal, host full, GPU updates")

    def recomputed_plan(count: int) -> Candidate:
        first = len(least) - count  # the first blocks offload: they do while there is room, before the others add up
        mixed = [*least[:first], *options[first:]]
        return streamed(setting, mixed, ahead=False, source="frugal, host full, fewer offloads")

    # With clipping an update on the device waits for the norm with all its data there, so it gains nothing.
    ways = [(at_home_plan, len(free)), (recomputed_plan, len(least))]
    ways += [] if setting.clip else [(gpu_updated_plan, len(order))]
    candidates = (_fewest(way, most, cpu_bytes, setting.budgets.cpu_bytes) for way, most in ways)
    return [candidate for candidate in candidates if candidate is not None]


def _fewest(plan_of: Callable[[int], _T], most: int, bytes_of: Callable[[_T], int], budget_bytes: int) -> _T | None:
    """Return the candidate for the smallest count, up to `most`, that needs at most `budget_bytes`. None where count 0
    is enough already, or where not even `most` is. The more, the fewer bytes, and mostly in proportion: so every second
    guess is an interpolation, and the others halve the range."""
    low, high = 0, most  # low needs too many bytes, high does not
    low_bytes, high_bytes = bytes_of(plan_of(low)), bytes_of(plan_of(high))
    if low_bytes <= budget_bytes or high_bytes > budget_bytes:
        return None
    interpolates = True
    while high - low > 1:
        share = (low_bytes - budget_bytes) / (low_bytes - high_bytes) if interpolates else 0.5
        middle = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
        its_bytes = bytes_of(plan_of(middle))
        if its_bytes <= budget_bytes:
            high, high_bytes = middle, its_bytes
        else:
            low, low_bytes = middle, its_bytes
        interpolates = not interpolates
    return plan_of(high)


def _least_options(setting: Setting) -> list[str]:
    """Return option names, one for each block, that keep the activations' part of the peak memory as low as possible,
    by bisection over that part."""
    chain, slices = setting.chain, setting.slices
    stages: list[list[tuple[int, dict[tuple[int, int], int]]]] = [[] for _ in chain.blocks]
    for moment in moments(chain, slices, setting.clip, setting.rounds):
        block = min(moment.stage, 2 * (len(chain.blocks) - 1) - moment.stage)
        # A movable block's weight and gradients are there while it runs, whatever the options: part of its level.
        weights = sum(t.bytes for t in chain.blocks[block].tensors)
        stages[block].append((moment.fixed_bytes + weights, moment.bytes_of))

    allowed = [[block.options.index(o) for o in setting.options(block)] for block in chain.blocks]
    kept_by_option = [[slices * kept_bytes(block, o) for o in block.options] for block in chain.blocks]
    # How many bytes a block's own options, and those of the block before, add to its fullest moment. Of options that
    # keep equally many bytes, those come first that offload less while the next block runs.
    own_levels = [
        {
            o: max(fixed + of.get((i, o), 0) for fixed, of in stages[i])
            for o in sorted(options, key=lambda o: (kept_by_option[i][o], chain.blocks[i].options[o].offloaded_bytes))
        }
        for i, options in enumerate(allowed)
    ]
    before = [
        {o: max((of.get((i - 1, o), 0) for _, of in stages[i]), default=0) for o in allowed[i - 1]} if i else {}
        for i in range(len(allowed))
    ]

    def attempt(limit: float) -> list[int] | None:
        chosen: list[int] = []
        standing = 0
        for i, levels in enumerate(own_levels):
            room = limit - standing - (before[i][chosen[-1]] if i else 0)
            option = next((o for o, level in levels.items() if level <= room), None)
            if option is None:
                return None
            chosen.append(option)
            standing += kept_by_option[i][option]
        return chosen

    high = 1.0
    while attempt(high) is None:
        high *= 2
    low = high / 2 if high > 1 else 0.0
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if attempt(middle) is not None else (middle, high)
    chosen = attempt(high)
    assert chosen is not None
    return [block.options[o].name for block, o in zip(chain.blocks, chosen, strict=True)]

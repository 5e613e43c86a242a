"""Makes all candidates that need no solver: those of `planner.greedy.streaming`, and one with activations by benefit.

They are ready at once, so there is an answer however little time the solver has. No final plan may be worse than they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.candidate.candidate import Candidate
from planner.candidate.setting import Setting
from planner.greedy.streaming import candidates, profile, streamed
from planner.schedule.chain import Block, Option
from planner.schedule.peak_moments import kept_bytes


def instant(setting: Setting, fits: Callable[[Candidate], bool]) -> Iterator[Candidate]:
    """The candidates without a solver that fit."""
    yield from candidates(setting, fits)
    candidate = by_benefit(setting, fits)
    if candidate is not None:
        yield candidate


def by_benefit(setting: Setting, fits: Callable[[Candidate], bool]) -> Candidate | None:
    """A candidate in LoHan's order: weights are streamed, and all activations recomputed; then activations are kept or
    offloaded block by block, most seconds saved per byte first, as many as fit. None where nothing fits even with all
    recomputed.
    """
    blocks = setting.chain.blocks
    least = profile(setting, "recompute")
    changes = sorted(
        (-_seconds_per_byte(block, block.option(name), option), index, option.name)
        for index, (block, name) in enumerate(zip(blocks, least, strict=True))
        for option in setting.options(block)
        if option.name != name and _seconds_per_byte(block, block.option(name), option) > 0
    )

    def candidate_of(count: int) -> Candidate:
        options = list(least)
        changed: set[int] = set()
        for _, index, name in changes[:count]:
            if index not in changed:  # the first change of a block is its best
                changed.add(index)
                options[index] = name
        return streamed(setting, options, ahead=True, source="streamed, by benefit")

    if not fits(candidate_of(0)):
        return None
    low, high = 0, len(changes) + 1  # low fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(candidate_of(middle)) else (low, middle)
    return candidate_of(low)


def _seconds_per_byte(block: Block, least: Option, option: Option) -> float:
    """Computing time that the option saves against `least`, per byte that it keeps or moves beyond it."""
    saved_s = least.forward_s + least.backward_s - option.forward_s - option.backward_s
    more = kept_bytes(block, option) + option.offloaded_bytes - kept_bytes(block, least) - least.offloaded_bytes
    return saved_s / max(1, more)

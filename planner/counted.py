"""What was counted of a job's data, as far as its plan depends on that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """`longest`: tokens of the longest row that is trained or evaluated on. `lengths`: tokens of a row in the largest
    slice there is, padding included, of what is read and of the labels; these differ for an encoder-decoder alone.
    `distinct_tokens`: see `planner.schedule.chain.Chain`; empty where a plan cannot depend on them. `cut`: documents
    that are trained on and are cut at `max_length`; None where `long_rows` says otherwise. No plan depends on it."""

    longest: int
    lengths: tuple[int, int]
    distinct_tokens: tuple[int, ...] = ()
    cut: int | None = None

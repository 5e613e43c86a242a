"""Holds the counts of a job's data that its plan depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of a job's data. `longest`: tokens of the longest row that is trained or evaluated on. `lengths`: tokens
    of a row in the largest slice, padding included, of what is read and of the labels; the two differ only for an
    encoder-decoder. `distinct_tokens`: see `planner.schedule.chain.Chain`; empty where a plan cannot depend on them.
    `cut`: how many training documents are cut at `max_length`; None where `long_rows` says not to cut. No plan depends
    on `cut`."""

    longest: int
    lengths: tuple[int, int]
    distinct_tokens: tuple[int, ...] = ()
    cut: int | None = None

"""Defines the counts of a job's data on which its plan depends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Token counts of a job's data. `longest`: tokens of the longest row that is trained or evaluated on. `lengths`:
    tokens per row in the largest slice (micro-batch), padding included, for the inputs and for the labels; the two
    differ only for an encoder-decoder. `distinct_tokens`: see `planner.schedule.chain.Chain`; empty if a plan cannot
    depend on them. `cut`: how many training documents are cut at `max_length`; None if the key `long_rows` says not to
    cut. No plan depends on `cut`."""

    longest: int
    lengths: tuple[int, int]
    distinct_tokens: tuple[int, ...] = ()
    cut: int | None = None

"""The row length at which a model's rotary frequencies change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeBorder:
    """Up to `tokens` a model has the frequencies it was made with. For longer rows it has one other set of frequencies
    (`longrope`), or another set for each length (`by_length`: `dynamic`). The largest position in a batch decides for
    the whole batch."""

    tokens: int
    by_length: bool

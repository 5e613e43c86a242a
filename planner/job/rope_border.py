"""The row length at which a model's rotary position embedding changes its frequencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeBorder:
    """Up to which row length a model's rotary frequencies are those that it was made with (`tokens`). Longer rows have
    one other set of frequencies (`longrope`) or, with `by_length`, another set for each length (`dynamic`). The largest
    position in a batch decides for the whole batch."""

    tokens: int
    by_length: bool

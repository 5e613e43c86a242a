"""The row length at which a model's rotary position embedding changes its frequencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeBorder:
    """The longest rows, of `tokens` tokens, for which a model has the rotary frequencies that it was made with. Longer
    rows get one other set of frequencies (rope type `longrope`) or, with `by_length`, another set for each length (rope
    type `dynamic`). The largest position in a batch decides for the whole batch."""

    tokens: int
    by_length: bool

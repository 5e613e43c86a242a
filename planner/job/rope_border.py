"""Where a model's rotary frequencies change with the length of a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeBorder:
    """Up to `tokens` a model has the frequencies it was made with. Beyond, it has others (`longrope`), or others for
    every length (`by_length`: `dynamic`). Those of a batch are those of its largest position."""

    tokens: int
    by_length: bool

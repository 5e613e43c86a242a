"""The keys that say how the entries of `dataset` are mixed, LLaMA-Factory's, and what they say together."""

from __future__ import annotations

import math
from typing import Any

from planner.job.source import SWITCHED_OFF, Mistake, Source

_STRATEGY, _SHARES = "mix_strategy", "interleave_probs"


def check_mixture(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Mistakes in what the keys say together; `values` by canonical name, `names`: canonical name -> the file's."""
    shares, entries = values.get(_SHARES), values.get("dataset")
    over = values.get(_STRATEGY) == "interleave_over"
    if over and isinstance(entries, (list, tuple)) and len(entries) > 1 and values.get("val_size") not in SWITCHED_OFF:
        repeats = "mix_strategy: interleave_over repeats records, so what is held out would be trained on, too"
        return [source.mistake(names["val_size"], "bad-value", f"{repeats}; give eval_dataset instead")]
    if isinstance(shares, str):
        try:
            shares = [float(part) for part in shares.split(",")]
        except ValueError:
            return []  # told by their types
    if not isinstance(shares, (list, tuple)) or not isinstance(entries, (list, tuple)):
        return []
    text = None
    if values.get(_STRATEGY, "concat") == "concat":
        text = f"it is for {_STRATEGY}: interleave_under, interleave_over or interleave_once; give that too"
    elif len(shares) != len(entries):
        text = f"it has {len(shares)} shares, and dataset has {len(entries)} entries"
    elif values.get(_STRATEGY) != "interleave_under" and any(share == 0 for share in shares):
        text = f"one is 0: {values[_STRATEGY]} goes on until every entry has come to its end; leave that entry out"
    else:
        try:
            total = math.fsum(map(float, shares))
        except (TypeError, ValueError):
            return []  # told by their types
        if abs(total - 1) > 1e-6:
            text = f"its shares are {total:g} together; they must be 1"
    return [source.mistake(names[_SHARES], "bad-value", text)] if text is not None else []

"""Checks the keys for mixing several datasets, which are LLaMA-Factory's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from planner.keys.source import SWITCHED_OFF, Mistake, Source
from planner.units import counted

_STRATEGY, _SHARES, _ONCE = "mix_strategy", "interleave_probs", "dataset_exact_deduplication"
_NOT_REPEATED = {
    "val_size": "so what is held out would be trained on, too; give eval_dataset instead",
    _ONCE: "and this key leaves out what repeats; give another mix_strategy, or leave this key out",
}


def check_mixture(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes of keys for mixing datasets that contradict one another or the list of datasets. `values`:
    canonical key -> value; `names`: canonical key -> the name that the file uses."""
    shares, entries = values.get(_SHARES), values.get("dataset")
    if isinstance(entries, (list, tuple)) and (mistakes := _repeats(entries, values, names, source)):
        return mistakes
    if isinstance(shares, str):
        try:
            shares = [float(part) for part in shares.split(",")]
        except ValueError:
            return []  # the check of types reports it
    if not isinstance(shares, (list, tuple)) or not isinstance(entries, (list, tuple)):
        return []
    text = None
    if values.get(_STRATEGY, "concat") == "concat":
        text = f"it is for {_STRATEGY}: interleave_under, interleave_over or interleave_once; give that too"
    elif len(shares) != len(entries):
        text = f"it has {counted(len(shares), 'share')}, and dataset has {counted(len(entries), 'entry', 'entries')}"
    elif values.get(_STRATEGY) != "interleave_under" and any(share == 0 for share in shares):
        text = f"one is 0: {values[_STRATEGY]} goes on until every entry has come to its end; leave that entry out"
    else:
        try:
            total = math.fsum(map(float, shares))
        except (TypeError, ValueError):
            return []  # the check of types reports it
        if abs(total - 1) > 1e-6:
            text = f"its shares sum to {total:g}; they must sum to 1"
    return [source.mistake(names[_SHARES], "bad-value", text)] if text is not None else []


def _repeats(entries: Sequence[object], values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes of keys that do not work where a mixture repeats records."""
    mistakes = []
    if len(entries) > 1 and values.get(_STRATEGY) == "interleave_over":
        over = "mix_strategy: interleave_over repeats records"
        for key, text in _NOT_REPEATED.items():
            if values.get(key) not in SWITCHED_OFF:
                mistakes.append(source.mistake(names[key], "bad-value", f"{over}, {text}"))
    elif values.get(_ONCE) not in SWITCHED_OFF:
        again = next((place for place, entry in enumerate(entries, 1) if entry in entries[: place - 1]), None)
        if again is not None:
            text = f"it would leave out all of entry {again} of dataset, which equals an earlier one; list it once"
            mistakes.append(source.mistake(names[_ONCE], "bad-value", text))
    return mistakes

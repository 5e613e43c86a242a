"""Checks the keys of a job that say which weights are trained whole. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.keys.patterns import SIMPLER, too_slow
from planner.keys.source import SWITCHED_OFF, Mistake, Source, shown

TRAINABLE, LAYERS = "trainable", "trainable_layers"
PLACE = "{layers}"
"""A placeholder in a pattern of parameter names. It stands for the numbers of the layers that `trainable_layers`
selects."""


def check_trainable(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes in `trainable` and `trainable_layers`. `values`: canonical key -> value; `names`: canonical
    key -> the name that the file uses. Where only `trainable_layers` is given, `values` gets the pattern that selects
    whole layers."""

    def bad(key: str, text: str, code: str = "bad-value") -> list[Mistake]:
        return [source.mistake(names.get(key, key), code, text)]

    layers, patterns = values.get(LAYERS), values.get(TRAINABLE)
    set_keys = [key for key in (TRAINABLE, LAYERS) if values.get(key) not in SWITCHED_OFF]
    if not set_keys:
        return []
    if values.get("method") == "lora" and layers not in SWITCHED_OFF:
        return bad(LAYERS, "it is for method: full; adapters are trained alone, and all else is frozen")
    if values.get("method") == "lsp" and layers not in SWITCHED_OFF:
        return bad(LAYERS, f"it is for method: full; under method: lsp name the weights to train whole in {TRAINABLE}")
    if layers not in SWITCHED_OFF and patterns in SWITCHED_OFF:
        values[TRAINABLE] = [rf".*\.{PLACE}\."]
        return []
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, (list, tuple)) or not all(isinstance(pattern, str) for pattern in listed):
        return []  # the check of types reports it
    has_place = any(PLACE in pattern for pattern in listed)
    if has_place != (layers not in SWITCHED_OFF):
        return bad(set_keys[0], f"{PLACE} in a pattern and {LAYERS} belong together; give both, or none")
    for pattern in listed:
        try:
            re.compile(pattern.replace(PLACE, "0"))
        except re.error as error:
            return bad(TRAINABLE, f"{shown(pattern)} is no pattern: {error}")
        if too_slow([pattern.replace(PLACE, "0")]) is not None:
            return bad(TRAINABLE, f"{shown(pattern)} takes too long to match: {SIMPLER}")
    return []

"""The keys of a job that say which weights full fine-tuning trains. Light: no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from planner.job.patterns import SIMPLER, too_slow
from planner.job.source import SWITCHED_OFF, Mistake, Source, shown

TRAINABLE, LAYERS = "trainable", "trainable_layers"
PLACE = "{layers}"
"""Stands in a pattern for the numbers of the layers that `trainable_layers` means."""
_RANGE = re.compile(r"\[\d*:?\d*\]$")
_DOT = re.compile(r"(?<!\\)\.(?!\+)")


def check_trainable(values: dict[str, Any], names: Mapping[str, str], source: Source) -> list[Mistake]:
    """Mistakes in these keys. `values` by canonical name; `names`: canonical name -> the name in the file. Where only
    `trainable_layers` is given, the pattern for whole layers is filled in."""

    def bad(key: str, text: str, code: str = "bad-value") -> list[Mistake]:
        return [source.mistake(names.get(key, key), code, text)]

    layers, patterns = values.get(LAYERS), values.get(TRAINABLE)
    given = [key for key in (TRAINABLE, LAYERS) if values.get(key) not in SWITCHED_OFF]
    if not given:
        return []
    if values.get("method") == "lora" and layers not in SWITCHED_OFF:
        return bad(LAYERS, "it is for method: full; adapters are trained alone, and all else is frozen")
    if layers not in SWITCHED_OFF and patterns in SWITCHED_OFF:
        values[TRAINABLE] = [rf".*\.{PLACE}\."]
        return []
    listed = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, (list, tuple)) or not all(isinstance(pattern, str) for pattern in listed):
        return []  # the check of types reports it
    asked = any(PLACE in pattern for pattern in listed)
    if asked != (layers not in SWITCHED_OFF):
        return bad(given[0], f"{PLACE} in a pattern and {LAYERS} belong together; give both, or none")
    for pattern in listed:
        try:
            re.compile(pattern.replace(PLACE, "0"))
        except re.error as error:
            return bad(TRAINABLE, f"{shown(pattern)} is no pattern: {error}")
        if too_slow([pattern.replace(PLACE, "0")]) is not None:
            return bad(TRAINABLE, f"{shown(pattern)} takes too long to match: {SIMPLER}")
    return []


def of_axolotl(patterns: object) -> object:
    """`unfrozen_parameters` as regular expressions, in which dots stand for themselves."""
    if not isinstance(patterns, list):
        return patterns
    return [_DOT.sub(r"\\.", pattern) if isinstance(pattern, str) else pattern for pattern in patterns]


def with_rows(patterns: object) -> str | None:
    """A pattern of axolotl's that means some rows of a weight; None where there is none."""
    listed = patterns if isinstance(patterns, list) else [patterns]
    return next((text for text in listed if isinstance(text, str) and _RANGE.search(text)), None)


def of_llama_factory(file: Mapping[str, object]) -> dict[str, object]:
    """What `finetuning_type: freeze` trains, as keys of a job."""
    modules, extra = _names(file.get("freeze_trainable_modules")), _names(file.get("freeze_extra_modules"))
    inside = [rf".*\.{PLACE}\.{re.escape(name) if name != 'all' else ''}" for name in modules or ("all",)]
    count = file.get("freeze_trainable_layers")
    return {LAYERS: 2 if count is None else count, TRAINABLE: [*inside, *(f".*{re.escape(name)}" for name in extra)]}


def _names(value: object) -> tuple[str, ...]:
    parts: Iterable[object] = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    return tuple(str(part).strip() for part in parts if str(part).strip())

"""Turns pydantic's errors into mistakes that name the keys and values as the job file has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from planner.keys.source import Mistake, Source


def mistakes_of(
    error: ValidationError,
    values: Mapping[str, Any],
    source: Source,
    names: Mapping[str, str],
    fields: Mapping[str, FieldInfo],
) -> list[Mistake]:
    """Return one mistake for each key for which pydantic reports an error. `values`: canonical key -> value; `names`:
    canonical key -> the name that the file uses; `fields`: the fields of the job's model, whose descriptions say what a
    value must be."""
    mistakes: dict[str, Mistake] = {}
    for detail in error.errors():
        field = str(detail["loc"][0])
        if field in mistakes:  # one wrong element of a list is enough
            continue
        key = names.get(field, field)
        phrase = fields[field].description
        if detail["type"] == "missing":
            if field == "tokenizer":
                continue
            mistakes[field] = source.mistake(key, "missing-key", f"it is missing; it must be {phrase}")
        else:
            code = "wrong-type" if detail["type"].endswith(("_type", "_from_float")) else "bad-value"
            text = f"it is {source.shown(key, values[field])}; it must be {phrase}"
            if detail["type"] == "string_type" and isinstance(values[field], (bool, int, float)):
                text += ": write it in quotes"
            mistakes[field] = source.mistake(key, code, text)
    return list(mistakes.values())

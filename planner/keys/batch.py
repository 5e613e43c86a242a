"""Checks the keys of a job that say how many rows a step has, and into how many micro-batches they are split."""

from __future__ import annotations

from typing import Any

from planner.keys.source import Mistake, Source

AUTO = "auto"
DEFAULT_ROWS = 8
_SIZE, _COUNT, _TOTAL = "per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size"


def check_batch(values: dict[str, Any], names: dict[str, str], source: Source) -> list[Mistake]:
    """Return the mistakes where the three keys for batch sizes contradict one another; where two are given, the third
    is filled into `values` (canonical key -> value). `names`: canonical key -> the name that the file uses.

    Rows of a step = rows of a micro-batch × number of micro-batches. Where the rows of a micro-batch are `auto`, or
    only the rows of a step are given, the planner decides the split.
    """
    sizes = {key: values[key] for key in (_SIZE, _COUNT, _TOTAL) if values.get(key) is not None}
    if any(not _is_count(value) for key, value in sizes.items() if (key, value) != (_SIZE, AUTO)):
        return []  # the check of types reports it
    total = sizes.get(_TOTAL)
    if sizes.get(_SIZE) == AUTO or sizes.keys() == {_TOTAL}:
        if sizes.get(_COUNT, 1) != 1:
            text = f"{names[_SIZE]} is auto, so the planner decides it; give {_TOTAL} instead, the rows of a step"
            return [source.mistake(names[_COUNT], "bad-value", text)]
        values |= {_SIZE: AUTO, _TOTAL: total or DEFAULT_ROWS}
    elif total is not None:
        missing = _COUNT if _COUNT not in sizes else _SIZE
        others = [key for key in (_SIZE, _COUNT) if key in sizes]
        product = sizes.get(_SIZE, 1) * sizes.get(_COUNT, 1)
        if total % product or (len(others) == 2 and total != product):
            text = f"it is {total}; it must be {' × '.join(names[key] for key in others)}"
            text += ", or leave one of the three out" if len(others) == 2 else " × a whole number"
            return [source.mistake(names[_TOTAL], "bad-value", text)]
        if missing not in sizes:
            values[missing] = total // product
    return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

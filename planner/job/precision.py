"""Settles the precision of a job whose file does not set it, and the dtype of the written model that other tools' keys
name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.job.aliases import ALIASES
from planner.job.source import Source
from planner.machine.memory import computes_bf16, has_gpu

_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_SWITCHES = {"pure_bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}


def settle_written(values: dict[str, Any], file: Mapping[str, object]) -> tuple[str, ...]:
    """Put into `values` the `save_dtype` that the `file` asks for by other tools' keys for the dtype of weights: those
    tools train the weights in that dtype, and write them in it. Returns notes for the user."""
    asked = [(key, dtype) for key in ("dtype", "torch_dtype") if (dtype := _DTYPES.get(str(file.get(key))))]
    asked += [(key, dtype) for key, dtype in _SWITCHES.items() if file.get(key) is True]
    asked += [("bf16: full", "bfloat16")] if file.get("bf16") == "full" else []
    if not asked:
        return ()
    key, dtype = asked[0]
    if values.get("method") == "lora":
        return (f"{key}: adapters, and masters and moments, stay fp32.",)
    if "save_dtype" in values:
        return (f"{key}: masters and moments stay fp32.",)
    values["save_dtype"] = dtype
    return (f"{key}: masters and moments stay fp32; save_dtype is {dtype}.",)


def settle_precision(values: dict[str, Any], source: Source, *, named_machine: bool) -> tuple[str, ...]:
    """Put `bf16` into `values` where a file of offmate's own leaves it out: true where the card computes in bf16, this
    machine's or a card known by its name (`named_machine`), as all of those do. Without a card all is fp32. Returns
    notes for the user.

    The run folder stores the value, so that a job stays as it was submitted.
    """
    said = (source.values.get(name) for name in ("bf16", *ALIASES["bf16"]))
    if any(value not in (None, "") for value in said):
        return ()
    found = True if named_machine else computes_bf16()
    if found is None:
        silent = "bf16 is false, as the file leaves it out and the driver does not say what the card is; for an RTX 30"
        return (f"{silent} or later write bf16: true and submit it again.",) if has_gpu() else ()
    values["bf16"] = found
    if found:
        return ("bf16 is true, as the file leaves it out and the card computes in it; bf16: false computes in fp32.",)
    return ("bf16 is false, as the file leaves it out and the card is older than the RTX 30: all is computed in fp32.",)

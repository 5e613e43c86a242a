"""In which precision a job computes whose file says nothing of it, and what dtype of the written model it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.job.aliases import ALIASES
from planner.job.source import Source
from planner.machine.memory import computes_bf16, has_gpu

_DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
_SWITCHES = {"pure_bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}


def settle_written(values: dict[str, Any], file: Mapping[str, object]) -> tuple[str, ...]:
    """Put into `values` the `save_dtype` that the `file` asks for by other tools' keys of what dtype the weights have:
    there they are trained in it, and written as they are. Returns what to tell of it."""
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
    """Put `bf16: true` into `values` where a file of our own leaves it out and the card computes in it: this machine's,
    or one that is known by its name (`named_machine`), as all of those do. Without a card all is fp32. Returns what to
    tell of it.

    A run folder has the value, so that a job stays what it was when it was handed in.
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

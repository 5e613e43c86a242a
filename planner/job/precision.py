"""Decides the precision (bf16 or fp32) of a job whose file does not set it."""

from __future__ import annotations

from typing import Any

from planner.importers.tools import ALIASES
from planner.keys.source import Source
from planner.machine.this_machine import computes_bf16, has_gpu


def settle_precision(values: dict[str, Any], source: Source, *, machine_bf16: bool | None) -> tuple[str, ...]:
    """Set `bf16` in `values` where an offmate job file leaves it out, and return notes for the user. It becomes true if
    the GPU computes in bf16. `machine_bf16`: whether the GPU of the machine that the job is planned for does so; None:
    the job is for this machine. Without a GPU it becomes false: the job runs in fp32.

    The run folder stores the value, so that the job stays as it was submitted.
    """
    file_values = (source.values.get(name) for name in ("bf16", *ALIASES["bf16"]))
    if any(value not in (None, "") for value in file_values):
        return ()
    is_bf16 = computes_bf16() if machine_bf16 is None else machine_bf16
    if is_bf16 is None:
        silent = "bf16 is false, as the file leaves it out and the driver does not say what the card is; for an RTX 30"
        return (f"{silent} or later write bf16: true and submit it again.",) if has_gpu() else ()
    values["bf16"] = is_bf16
    if is_bf16:
        return ("bf16 is true, as the file leaves it out and the card computes in it; bf16: false computes in fp32.",)
    return ("bf16 is false, as the file leaves it out and the card is older than the RTX 30: all is computed in fp32.",)

"""Settles the precision of a job whose file does not set it."""

from __future__ import annotations

from typing import Any

from planner.importers.tools import ALIASES
from planner.keys.source import Source
from planner.machine.installed_memory import computes_bf16, has_gpu


def settle_precision(values: dict[str, Any], source: Source, *, named_machine: bool) -> tuple[str, ...]:
    """Put `bf16` into `values` where a file of offmate's own leaves it out: true where the card computes in bf16, this
    machine's or a card known by its name (`named_machine`), as all of those do. Without a card all is fp32. Returns
    notes for the user.

    The run folder stores the value, so that a job stays as it was submitted.
    """
    file_values = (source.values.get(name) for name in ("bf16", *ALIASES["bf16"]))
    if any(value not in (None, "") for value in file_values):
        return ()
    is_bf16 = True if named_machine else computes_bf16()
    if is_bf16 is None:
        silent = "bf16 is false, as the file leaves it out and the driver does not say what the card is; for an RTX 30"
        return (f"{silent} or later write bf16: true and submit it again.",) if has_gpu() else ()
    values["bf16"] = is_bf16
    if is_bf16:
        return ("bf16 is true, as the file leaves it out and the card computes in it; bf16: false computes in fp32.",)
    return ("bf16 is false, as the file leaves it out and the card is older than the RTX 30: all is computed in fp32.",)

"""Reads the plan and the chain of a plan.json, including those of earlier versions."""

from __future__ import annotations

from typing import Any

from planner.codec import from_json
from planner.optimizers.adamw import AdamW
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.muon import Muon
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan


def plan_of(data: dict[str, Any]) -> Plan:
    """The plan that `data`, parsed JSON, describes. Earlier versions also wrote whether a time limit ended the search.
    Raises ValueError, KeyError or TypeError if `data` describes no plan."""
    return from_json(Plan, {name: value for name, value in data.items() if name != "cut_short"})


def chain_of(data: dict[str, Any]) -> Chain:
    """The chain that `data`, parsed JSON, describes; `data` is changed. Earlier versions wrote four fields instead of a
    tensor's `optimizer`. Raises ValueError, KeyError or TypeError if `data` describes no chain."""
    for tensor in [*(t for block in data["blocks"] for t in block["tensors"]), *data.get("frame_tensors", ())]:
        if "optimizer" not in tensor:
            tensor["optimizer"] = _optimizer_of(tensor)
    return from_json(Chain, data)


def _optimizer_of(tensor: dict[str, Any]) -> dict[str, Any]:
    """The JSON of the optimizer that four fields of an earlier version stand for; removes these fields from
    `tensor`."""
    rounded, side = tensor.pop("rounded", False), tensor.pop("shorter_side", 0)
    seconds = {f"{where}_s": tensor.pop(f"{where}_update_s", 0.0) for where in ("gpu", "cpu")}
    if side:
        return {"kind": Muon.kind, "shorter_side": side, **seconds}
    return {"kind": AdamW8bit.kind if rounded else AdamW.kind}

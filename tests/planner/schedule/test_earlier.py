"""Chains as earlier versions wrote them, with four fields in place of a tensor's optimizer."""

from __future__ import annotations

from typing import Any

from planner.codec import to_json
from planner.optimizers.adamw_8bit import AdamW8bit
from planner.optimizers.muon import Muon
from planner.schedule.earlier import chain_of
from tests.support.chains import chain


def test_a_tensor_of_an_earlier_plan_has_the_optimizer_that_its_fields_stand_for() -> None:
    written: Any = to_json(chain(2))
    for block in written["blocks"]:
        for tensor in block["tensors"]:
            del tensor["optimizer"]
            tensor |= {"rounded": False, "shorter_side": 0, "gpu_update_s": 0.0, "cpu_update_s": 0.0}
    assert chain_of(written) == chain(2)


def test_moments_in_8_bits_and_matrices_of_muon_are_read_too() -> None:
    written: Any = to_json(chain(2))
    first, *_ = written["blocks"][0]["tensors"]
    del first["optimizer"]
    elements = first["elements"] = 4096
    first |= {"bytes": 4 * elements, "gradient_bytes": 4 * elements}
    eight, matrix = AdamW8bit(), Muon(shorter_side=64, gpu_s=0.5, cpu_s=2.0)
    old = {"rounded": True, "shorter_side": 0, "gpu_update_s": 0.0, "cpu_update_s": 0.0}
    first |= old | {"state_bytes": sum(eight.moment_bytes(elements))}
    assert chain_of(written).blocks[0].tensors[0].optimizer == eight
    del first["optimizer"]
    first |= {"rounded": False, "shorter_side": 64, "gpu_update_s": 0.5, "cpu_update_s": 2.0}
    first["state_bytes"] = 4 * elements
    assert chain_of(written).blocks[0].tensors[0].optimizer == matrix

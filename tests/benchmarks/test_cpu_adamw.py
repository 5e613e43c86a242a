"""The benchmark of updates on the CPU: every contender that is here is measured, and the others are named."""

from __future__ import annotations

import importlib.util

import torch

from benchmarks import cpu_adamw
from planner.cpu.adamw import NativeKernel, cpu_kernel

torch.set_num_threads(1)


def test_every_contender_has_rates_and_shares_and_ours_no_bit_of_difference(capsys):
    found = cpu_adamw.summary(cpu_adamw.measure(8192, 3, 1))
    ours = {"torch_fused", "chunked", *(["native"] if isinstance(cpu_kernel(), NativeKernel) else [])}
    present, missing = found["differing"].keys(), found["missing"].keys()
    assert ours <= present and present | missing == {"torch_fused", "chunked", "native", "deepspeed"}
    assert not present & missing and ("deepspeed" in present) == bool(importlib.util.find_spec("deepspeed"))
    assert all(found["differing"][name] == 0.0 for name in ours)
    for kind in ("clock", "processor"):
        for name in ours:
            shares = found[kind]["shares"][name]
            assert shares["copies"]["quarter"] <= shares["copies"]["median"] <= shares["copies"]["three_quarters"]
            assert (shares["deepspeed"] is None) == ("deepspeed" in missing)
    cpu_adamw.show(found)
    said = capsys.readouterr().out
    assert all(name in said for name in ours | set(missing))


def test_a_share_is_the_median_of_each_rounds_own_ratio_to_the_fastest():
    rates = {"ours": [2.0, 30.0, 8.0], "slow": [1.0, 1.0, 1.0], "fast": [2.0, 10.0, 4.0]}
    share = cpu_adamw.share(rates, "ours", ("slow", "fast", "absent"))
    assert share is not None and (share["of"], share["median"]) == ("fast", 2.0)
    assert cpu_adamw.share(rates, "ours", ("absent",)) is None

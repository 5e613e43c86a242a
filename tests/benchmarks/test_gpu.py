"""The benchmark for GPUs, run for real on the CPU: one command, every contender measured or named with its reason.
Some tests take seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.spread import Spread
from tests import ROOT

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "found.json"
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--dtype", "bf16", "--shares", "0.5"]
    done = subprocess.run(
        [*command, "--planning-seconds", "1", "--json", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(path.read_text("utf-8"))["results"]
    return {one["heat"]["name"]: one for one in result["contenders"]}, done.stdout


def test_every_contender_is_measured_or_missing_for_a_reason(run):
    found, table = run
    assert list(found) == [
        "plain PyTorch",
        "offmate, 50% of plain",
        "offmate, least possible",
        "DeepSpeed ZeRO-Offload",
        "DeepSpeed ZeRO-3 offload",
    ]
    for name, one in found.items():
        assert name in table
        assert bool(one["heat"]["missing"]) == (one["figures"] is None)
        assert one["figures"] is None or one["figures"]["step_s"]["median"] > 0
    for name in ("plain PyTorch", "offmate, 50% of plain", "offmate, least possible"):
        assert found[name]["figures"] is not None
    if importlib.util.find_spec("deepspeed") is None:
        assert found["DeepSpeed ZeRO-Offload"]["heat"]["missing"] == "deepspeed is not installed"


def test_peaks_are_as_predicted_and_within_budgets_that_plain_pytorch_would_break(run):
    found, _ = run
    plain = found["plain PyTorch"]["figures"]["peak_bytes"]
    ours = [one for name, one in found.items() if name.startswith("offmate") and one["figures"]]
    assert len(ours) == 2
    for one in ours:
        heat, measured = one["heat"], one["figures"]["peak_bytes"]
        assert 0.99 * heat["predicted_bytes"] <= measured <= heat["predicted_bytes"] <= heat["budget_bytes"] < plain


def test_all_contenders_train_the_same_model_on_the_same_tokens(run):
    found, _ = run
    losses = {one["heat"]["warm"]["loss"] for one in found.values() if one["figures"]}
    assert len(losses) == 1


def test_a_spread_of_ratios_is_over_each_numbers_own_base():
    assert Spread.of_ratios([2.0, 30.0, 8.0], [2.0, 10.0, 4.0]) == Spread(2.0, 1.0, 3.0)
    assert f"{Spread(2.0, 1.0, 3.0):.1f}" == "2.0 (1.0, 3.0)"

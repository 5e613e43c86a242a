"""The questions to a new card are asked one by one: one that fails or hangs leaves the others their answers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import card, card_questions
from planner.measure.analysis import estimate_times
from planner.measure.machine_rates import estimate_hardware
from tests.support.arena import arena_on
from tests.support.cuda.device import Device

ANSWERS = {
    "machine": "(folder / 'machine.json').write_text('{\"device\": \"A Card\"}')",
    "copies": "import time; time.sleep(100)",
    "plain-fp32": "raise SystemExit('no such thing')",
    "plan-fp32": "(folder / 'plan-fp32.json').write_text('{\"least_bytes\": 7}')",
}


def test_a_question_that_fails_or_hangs_leaves_the_others_their_answers(tmp_path, monkeypatch: pytest.MonkeyPatch):
    def command_of(question, folder, sizes):
        begin = f"from pathlib import Path; folder = Path({str(folder)!r}); print('asked', flush=True); "
        return [sys.executable, "-S", "-c", begin + ANSWERS[question]]

    monkeypatch.setattr(card, "command_of", command_of)
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    monkeypatch.setattr(card, "QUESTIONS", {**card.QUESTIONS, "copies": 2})
    monkeypatch.setattr(sys, "argv", ["card.py", "--only", *ANSWERS])
    assert card.main() == 1
    found = json.loads((tmp_path / "card-a-card.json").read_text("utf-8"))["found"]
    assert found["machine"]["answer"] == {"device": "A Card"}
    assert found["plan-fp32"]["answer"] == {"least_bytes": 7}
    assert (found["copies"]["exit_code"], found["copies"]["said"]) == (None, "asked\n")
    assert found["plain-fp32"]["exit_code"] == 1 and "no such thing" in found["plain-fp32"]["said"]


@pytest.mark.long
@pytest.mark.emulated
@pytest.mark.slow
def test_what_is_asked_of_a_plan_is_answered_on_the_emulated_device(
    device: Device, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rates and times, which that one cannot say."""
    sizes = {"layers": 3, "width": 64, "vocabulary": 128, "length": 16, "batch": 2, "slices": 2, "device": "cuda"}
    (tmp_path / "work.json").write_text(json.dumps(sizes), "utf-8")
    (tmp_path / "plain-bf16.json").write_text('{"peak_bytes": 4000000}', "utf-8")
    machine = replace(estimate_hardware(torch.device("cuda")), cpu_bytes=2**30, min_transfer_bytes=0)
    monkeypatch.setattr(card_questions, "measure_hardware", lambda device, dtype: machine)
    monkeypatch.setattr(card_questions, "measure_times", lambda analysis, *_, **__: estimate_times(analysis, machine))
    monkeypatch.setattr("planner.schedule.places.SMALL_BYTES", 2048)
    monkeypatch.setattr("planner.schedule.places.PAGE_BYTES", 2**16)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setattr("torch.use_deterministic_algorithms", lambda *_, **__: None)
    for question in ("plan-bf16", "bits-bf16"):
        card_questions.answer(question, tmp_path)
    for question in ("engine-bf16", "peaks-bf16"):
        with arena_on(device):
            card_questions.answer(question, tmp_path)
    found = json.loads((tmp_path / "engine-bf16.json").read_text("utf-8"))
    assert found["losses_equal"] and found["state_equal"]
    peaks = json.loads((tmp_path / "peaks-bf16.json").read_text("utf-8"))
    assert len(peaks) == 4
    for told in (found | {"counts": found["counts"][-1], "driver_bytes": found["driver_bytes"][-1]}, *peaks):
        assert told["driver_bytes"] == told["counts"]["most_reserved"] == told["predicted_bytes"]
        assert told["counts"]["strays"] == 0
    assert found["queues"]["cpu_update_parameters_per_s"] > 0

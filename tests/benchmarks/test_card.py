"""The questions to a new card are asked one by one: one that fails or hangs leaves the others theirs. Some tests take
seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import card, card_questions, card_tests
from benchmarks.forked import Ended, Forks
from planner.measure.analysis import estimate_times
from planner.measure.machine_rates import estimate_hardware
from tests import ROOT
from tests.support.arena import arena_on
from tests.support.cuda.device import Device


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def asked(monkeypatch, tmp_path, answers, **limits):
    """The exit code, and what is found, where `answers` are functions of a folder."""
    monkeypatch.setattr(card, "answer", lambda question, folder, *_: answers[question](folder))
    monkeypatch.setattr(card, "QUESTIONS", {**card.QUESTIONS, **limits})
    monkeypatch.setattr("benchmarks.contenders.Work.prepare", lambda work: None)
    monkeypatch.setattr(sys, "argv", ["card.py", "--json", str(tmp_path / "card.json"), "--only", *answers])
    code = card.main()
    return code, json.loads((tmp_path / "card.json").read_text("utf-8"))["found"]


def test_a_question_that_fails_or_hangs_leaves_the_others_theirs_and_what_it_has_found(monkeypatch, tmp_path):
    def hangs(folder):
        (folder / "copies.json").write_text('{"to the device": 1}')
        print("asked", flush=True)
        os.write(1, f"{subprocess.Popen(['sleep', '100']).pid}\n".encode())
        time.sleep(100)

    def fails(folder):
        raise SystemExit("no such thing")

    code, found = asked(
        monkeypatch,
        tmp_path,
        copies=2,
        answers={
            "machine": lambda folder: (folder / "machine.json").write_text('{"device": "A Card"}'),
            "copies": hangs,
            "plain-fp32": fails,
            "plan-fp32": lambda folder: (folder / "plan-fp32.json").write_text('{"least_bytes": 7}'),
        },
    )
    assert code == 1
    assert found["machine"]["answer"] == {"device": "A Card"}
    assert found["plan-fp32"]["answer"] == {"least_bytes": 7}
    assert (found["copies"]["exit_code"], found["copies"]["answer"]) == (None, {"to the device": 1})
    said, started = found["copies"]["said"].split()
    assert said == "asked" and not Path(f"/proc/{started}/exe").exists()  # what it has started does not outlive it
    assert found["plain-fp32"]["exit_code"] == 1 and "no such thing" in found["plain-fp32"]["said"]


def test_bits_are_asked_under_strict_kernels_and_again_where_an_operation_has_none(monkeypatch, tmp_path):
    asked_under = []

    def plain(folder, about):
        asked_under.append(torch.is_deterministic_algorithms_warn_only_enabled())
        torch.zeros(4).put(torch.tensor([1]), torch.ones(1))  # which has no deterministic kernel, on the CPU either
        return {"peak_bytes": 1}

    monkeypatch.setattr(card_questions, "plain", plain)
    with pytest.warns(UserWarning, match="put_ does not have"):
        card_questions.answer("plain-bf16", tmp_path)
    assert asked_under == [False, True]
    assert json.loads((tmp_path / "plain-bf16.json").read_text("utf-8")) == {"peak_bytes": 1}
    assert "but for put_" in (tmp_path / "plain-bf16.kernels").read_text("utf-8")


def test_what_questions_need_is_imported_without_cuda_and_threads_and_what_is_carried_stays_on_the_path(tmp_path):
    code = """
import torch, os
def begun(*_, **__): raise AssertionError("CUDA begins")
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_capability", "mem_get_info"):
    setattr(torch.cuda, name, begun)
import benchmarks.card
from benchmarks.contenders import Work
from benchmarks.forked import Forks
Forks()
Work(layers=1, width=512, vocabulary=4096, length=8, batch=1, slices=1, dtype="bf16", device="cpu").prepare()
print(len(os.listdir("/proc/self/task")))
print(os.environ["PYTHONPATH"])
"""
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"1\n{ROOT}{os.pathsep}{path}\n"), done.stderr


def test_answers_come_in_the_order_of_their_questions_and_an_end_without_one_is_told():
    forks = Forks()
    works = [lambda: time.sleep(0.2) or 1, lambda: 2, lambda: os._exit(9)]
    answers = forks.answers(works, 2)
    assert [next(answers), next(answers)] == [1, 2]
    with pytest.raises(Ended, match="exit code 9"):
        next(answers)


def test_the_files_with_tests_for_a_card_are_named():
    marked = re.compile(r"mark\.gpu\b")
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())
    }
    assert files - {"tests/benchmarks/test_card.py"} == {*card_tests.FILES}


@pytest.mark.emulated
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
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")  # the emulated device has no cuBLAS
    monkeypatch.setattr("planner.measure.repeatable._WORKSPACES", (":0:0",))
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

"""Whole runs whose optimizer states the host has no memory for, planned and trained: plain PyTorch's bits, also after
a SIGKILL in the middle of a step's writes. Some tests take seconds: each process that they start imports PyTorch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import planner.__main__ as planner_process
from planner.codec import from_json
from planner.commands.plan_job import plan_job
from planner.errors import UserError
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.schedule.chain import Chain
from planner.schedule.plan import Plan
from planner.search import activations_on_disk, states_on_disk
from planner.search.problem import Problem
from tests.support.runs import make_run
from tests.worker.check.test_verify_resume import plain_answer
from tests.worker.training.test_run import plain_run
from worker.sample import answers
from worker.training.loop import Training
from worker.training.metrics import read_metrics
from worker.training.model import load_model
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")
BYTES = 300_000  # of the host; of weights, states and gradients there are 710,000
GPU_BYTES = 260_000


def all_wholly_on_disk(problem: Problem) -> Problem:
    """So small weights are less than the rings through which they pass: no planner would."""
    found = states_on_disk._on_disk(problem, states_on_disk._may_be_on_disk(problem))
    return states_on_disk._wholly_on_disk(found, states_on_disk._may_be_wholly_on_disk(found))


def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wholly: bool = False, **keys: object
) -> tuple[Job, RunFolder]:
    """The run folder as the planner leaves it, of a model that is small for states on disk. `wholly`: with the
    layers' weights there, too."""
    if wholly:
        monkeypatch.setattr(activations_on_disk, "with_states_on_disk", all_wholly_on_disk)
    monkeypatch.setattr(states_on_disk, "PIECE_ELEMENTS", 1024)
    monkeypatch.setattr("planner.schedule.chain.LEAST_BYTES", 4096)
    job, run = make_run(
        tmp_path,
        "llama",
        bf16=True,
        gradient_accumulation_steps=2,
        cpu_budget=BYTES,
        gpu_budget=GPU_BYTES,
        disk_paths=(str(tmp_path / "drive"),),
        **keys,
    )
    if wholly:  # the model's files have to have its weights
        load_model(job).save_pretrained(job.model)
    answer = plan_job(job, torch.device("cpu"), cache=None, measure=False)
    assert answer.plan.cpu_peak_bytes <= BYTES
    assert any(t.states_on_disk and t.name in answer.plan.cpu_updated() for t in answer.chain.tensors())
    there = [t.name for t in answer.chain.tensors() if t.wholly_on_disk]
    assert len(there) == (21 if wholly else 0) and answer.plan.cpu_updated().issuperset(there)
    run.plan.write_text(json.dumps(answer.to_json()))
    return job, run


def losses_of(run: RunFolder) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_metrics(run.metrics) if event["event"] == "step"}


def assert_is_plain_pytorchs(job: Job, run: RunFolder) -> None:
    losses, weights = plain_run(job, run)
    assert list(losses_of(run).values()) == losses
    trained = AutoModelForCausalLM.from_pretrained(run.path / "output")
    assert [n for n, p in trained.named_parameters() if not torch.equal(p, weights[n])] == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from planner.run.folder import RunFolder
from worker.storage.states import StatesOnDisk
from worker.training.run import run_job
from worker.training.stop import StopRequest
write, left = StatesOnDisk.write, [int(sys.argv[2])]
def counted(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
StatesOnDisk.write = counted
run_job(RunFolder(Path(sys.argv[1])), StopRequest())
"""


@pytest.mark.parametrize("wholly", [False, True], ids=["states", "wholly"])
def test_a_run_with_clipping_goes_on_after_a_sigkill_from_states_that_its_checkpoint_names(
    wholly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = planned(tmp_path, monkeypatch, wholly=wholly, save_total_limit=1)
    plan = json.loads(run.plan.read_text())
    updated = {name for stage in plan["plan"]["stages"] for name in stage["cpu_update"]}
    tensors = {t["name"]: t for b in plan["chain"]["blocks"] for t in b["tensors"]}
    a_step = sum(-(-tensors[name]["elements"] // 1024) for name in updated if tensors[name]["states_on_disk"])
    writes = a_step + 6 * a_step + a_step // 2  # the first states, six steps, and a half; the checkpoint is of step 4
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(run.path), str(writes)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    before = losses_of(run)
    assert list(before) in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7])  # a step's updates may follow its line
    (saved,) = run.checkpoints.glob("step-*")
    assert saved.name == "step-4" and json.loads((saved / "states.json").read_text())["homes"] == 2
    written = sum(file.stat().st_size for file in saved.iterdir())
    named = sum(12 * tensors[name]["elements"] for name in updated if tensors[name]["states_on_disk"])
    assert written < 12 * sum(t["elements"] for t in tensors.values()) - named + 2**17  # nothing of that is copied
    asked: list[int] = []  # room is asked for what is written, here and where the job is planned

    def asking(*args: object, checkpoint_bytes: int, **rest: object) -> int:
        asked.append(checkpoint_bytes)
        return 2**40

    monkeypatch.setattr("worker.training.run.check_room", asking)
    monkeypatch.setattr("planner.__main__.check_room", asking)
    assert run_job(run, StopRequest())
    chain = from_json(Chain, plan["chain"])
    planner_process._check_room(job, from_json(Plan, plan["plan"]), chain, run)
    trained = sum(t.elements for t in (*chain.tensors(), *chain.frame_tensors))
    assert asked == [12 * trained - named + 2**20] * 2
    assert next(e for e in read_metrics(run.metrics)[::-1] if e["event"] == "start")["resumed_from"] == 4
    assert losses_of(run).items() >= before.items()
    assert_is_plain_pytorchs(job, run)
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.parametrize("wholly", [False, True], ids=["states", "wholly"])
def test_a_run_without_clipping_whose_checkpoints_are_copies_goes_on_after_a_stop(
    wholly: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    job, run = planned(tmp_path, monkeypatch, wholly=wholly, max_grad_norm=None, save_total_limit=2)
    stop = StopRequest()
    step = Training._step

    def stopping(self, batches, number, *args, **rest):
        if number == 5:
            stop.asked = True
        return step(self, batches, number, *args, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_step", stopping)
        assert not run_job(run, stop)
    assert not any(run.checkpoints.glob("*/states.json"))
    assert "disk: each step reads and writes" in caplog.text
    assert "less than 0.01% of the drive's rated life" in caplog.text
    assert run_job(run, StopRequest())
    assert_is_plain_pytorchs(job, run)
    assert answers(run, ("the",), 5, as_text=True) == [plain_answer(run.output, "the", 5)]
    assert list((tmp_path / "drive").iterdir()) == []


def test_a_run_that_would_wear_the_drive_is_refused_before_anything_is_written_and_goes_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = planned(tmp_path, monkeypatch, disk_rated_writes=10**6, max_steps=None, num_train_epochs=1)
    assert json.loads(run.plan.read_text())["disk"]["rated_bytes"] == 10**6  # how many steps is not known yet
    with pytest.raises(UserError, match="of the drive's rated life") as raised:
        run_job(run, StopRequest())
    assert raised.value.code == "disk-worn" and not (tmp_path / "drive").exists()
    run.plan.unlink()
    run.write_resolved(job.model_copy(update={"max_steps": 7}).resolved_yaml())
    asked = ["plan", str(run.path), "--device", "cpu"]
    assert planner_process.main(asked) != 0 and run.read_plan() is None
    refused = json.loads(run.error.read_text())
    assert refused["code"] == "disk-worn" and "the run's 7 steps" in str(refused)
    (run.checkpoints / "step-3").mkdir(parents=True)  # planned again: as after memory that was not enough
    assert planner_process.main(asked) == 0
    document = run.read_plan()
    assert document is not None and document["disk"]["steps"] == 7
    elsewhere = job.model_copy(update={"disk_paths": (str(tmp_path / "gone" / "drive"),)})
    with pytest.raises(UserError, match="but none above it"):
        plan_job(elsewhere, torch.device("cpu"), cache=None, measure=False)

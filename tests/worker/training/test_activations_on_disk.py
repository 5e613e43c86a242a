"""Whole runs whose activations go to a drive and come back: plain PyTorch's bits, also after a SIGKILL, and nothing is
left there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.codec import to_json
from planner.commands.plan_job import plan_job
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.schedule.compile import compile_program
from planner.schedule.disk_use import step_activation_bytes
from planner.schedule.memory_use import cpu_peak_bytes, gpu_peak_bytes
from planner.search.activations_on_disk import with_twins
from tests.support.runs import make_run
from tests.worker.training.test_planned_on_disk import assert_is_plain_pytorchs, losses_of
from worker.storage.activations import ActivationsOnDisk
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest

pytestmark = pytest.mark.usefixtures("one_thread")


def stored(tmp_path: Path, **keys: object) -> tuple[Job, RunFolder, int]:
    """A run whose plan has the activations of all layers on disk, and what a step writes."""
    job, run = make_run(tmp_path, "llama", gradient_accumulation_steps=4, disk_paths=(str(tmp_path / "drive"),), **keys)
    answer = plan_job(job, torch.device("cpu"), cache=None, measure=False)
    chain = with_twins(answer.chain)
    layers = [next(o.name for o in block.options if o.on_disk) for block in chain.blocks[1:-1]]
    plan = replace(answer.plan, options=(answer.plan.options[0], *layers, answer.plan.options[-1]))
    peak = gpu_peak_bytes(compile_program(plan, chain), chain)
    plan = replace(plan, gpu_peak_bytes=peak, gpu_budget_bytes=peak, cpu_peak_bytes=cpu_peak_bytes(plan, chain))
    document = {**answer.to_json(), "plan": to_json(plan), "chain": to_json(chain)}
    run.plan.write_text(json.dumps(document))
    return job, run, step_activation_bytes(plan, chain)


_KILLED = """
import os, signal, sys
from pathlib import Path
from planner.run.folder import RunFolder
from worker.storage.activations import ActivationsOnDisk
from worker.training.run import run_job
from worker.training.stop import StopRequest
write, left = ActivationsOnDisk.write, [int(sys.argv[2])]
def counted(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*args)
ActivationsOnDisk.write = counted
run_job(RunFolder(Path(sys.argv[1])), StopRequest())
"""


def test_a_run_that_is_killed_leaves_nothing_on_the_drive_and_goes_on_bit_by_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    job, run, a_step = stored(tmp_path, save_steps=2)
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(run.path), "55"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert [path for path in (tmp_path / "drive").rglob("*") if path.is_file()] == []
    before = losses_of(run)
    made: list[ActivationsOnDisk] = []
    close = ActivationsOnDisk.close
    monkeypatch.setattr(ActivationsOnDisk, "close", lambda self: made.append(self) or close(self))
    assert run_job(run, StopRequest())
    start = [e for e in read_metrics(run.metrics) if e["event"] == "start"][-1]
    assert start["resumed_from"] and losses_of(run).items() >= before.items()
    assert_is_plain_pytorchs(job, run)
    assert list((tmp_path / "drive").iterdir()) == []
    assert "disk: each step reads and writes" in caplog.text and " of activations" in caplog.text
    steps, (scratch,) = start["total_steps"] - start["resumed_from"], made
    assert scratch.written_bytes == scratch.read_bytes
    assert 0.7 * steps * a_step < scratch.written_bytes <= steps * a_step  # rows are padded to shorter lengths

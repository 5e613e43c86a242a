"""Trainer processes whose run folder is on a disk that is filled by somebody else. Some tests take seconds: each
process that they start imports PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from planner.errors import Exit
from planner.run.folder import RunFolder
from tests.support.daemons import until
from tests.support.disks import small_disk
from tests.support.runs import STEPS, make_run
from worker.storage.checkpoint import read_checkpoint
from worker.training.metrics import read_metrics
from worker.training.run import run_job
from worker.training.stop import StopRequest

DISK_BYTES = 48 * 2**20
PATIENCE_S = 300.0


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(DISK_BYTES) as folder:
        yield folder


class Trainer:
    """A trainer that stands still after a step until it is told to go on. Its log is on another disk."""

    def __init__(self, run: RunFolder, log: Path, *, held_at: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(log.parent / "hf"), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.support.fakes.held_trainer", str(held_at), str(run.path)]
        self.run, self.log = run, log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=file, stderr=file
            )
        if held_at <= STEPS:
            until(lambda: held_at in steps(run) or self.process.poll() is not None, f"step {held_at}", PATIENCE_S)

    def finish(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(PATIENCE_S)
        assert "Traceback" not in self.said()
        return code

    def said(self) -> str:
        return self.log.read_text("utf-8")


def steps(run: RunFolder) -> list[object]:
    return [event["step"] for event in read_metrics(run.metrics) if event["event"] == "step"]


def fill(disk: Path) -> Path:
    """Somebody's file that takes all there is; returns it."""
    ballast = disk / "somebody's"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return ballast


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the run that has all the room it wants."""
    folder = tmp_path_factory.mktemp("undisturbed")
    _, run = make_run(folder, "llama", save_steps=4)
    assert run_job(run, StopRequest())
    return weights(run.output)


def test_a_disk_that_is_full_in_mid_training_costs_the_steps_since_the_last_checkpoint(
    disk: Path, tmp_path: Path
) -> None:
    _, run = make_run(tmp_path, "llama", disk / "run", save_steps=4)
    trainer = Trainer(run, tmp_path / "log.txt", held_at=6)
    ballast = fill(disk)
    assert trainer.finish() == Exit.FAILED
    error = run.read_error()
    assert error is not None and error["code"] == "disk-full", trainer.said()
    assert "[disk-full]" in trainer.said()
    assert read_checkpoint(run.checkpoints / "step-4").step == run.last_checkpoint_step() == 4
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-4"]
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []
    ballast.unlink()
    again = Trainer(run, tmp_path / "log.txt", held_at=STEPS + 1)
    assert again.finish() == Exit.DONE, again.said()
    assert steps(run) == list(range(1, STEPS + 1))
    assert [event["resumed_from"] for event in read_metrics(run.metrics) if event["event"] == "start"] == [None, 4]


@pytest.mark.parametrize(
    "elsewhere",
    [pytest.param(False, id="in the run folder"), pytest.param(True, id="on another disk")],
)
def test_a_disk_that_is_full_at_the_end_costs_no_step(
    disk: Path, tmp_path: Path, elsewhere: bool, undisturbed: dict[str, torch.Tensor]
) -> None:
    """The room for the trained weights has been kept since the start."""
    place = tmp_path / "out" if elsewhere else disk / "run" / "output"
    _, run = make_run(tmp_path, "llama", disk / "run", save_steps=4, output_dir=str(place) if elsewhere else None)
    trainer = Trainer(run, tmp_path / "log.txt", held_at=STEPS)
    ballast = fill(disk)
    if elsewhere:
        assert trainer.finish() == Exit.DONE, trainer.said()
    else:
        assert trainer.finish() == Exit.FAILED
        error = run.read_error()
        assert error is not None and error["code"] == "disk-full", trainer.said()
        assert error["numbers"][-1] == f"the trained weights are kept in {run.trained}/step-{STEPS}"
        assert not run.output.exists()
        ballast.unlink()
        again = Trainer(run, tmp_path / "log.txt", held_at=STEPS + 1)
        assert again.finish() == Exit.DONE, again.said()
        starts = [event["resumed_from"] for event in read_metrics(run.metrics) if event["event"] == "start"]
        assert starts == [None, STEPS]
    assert steps(run) == list(range(1, STEPS + 1))
    assert not run.trained.exists()
    assert read_metrics(run.metrics)[-1]["output"] == str(place)
    found = weights(place)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(tensor, undisturbed[name]) for name, tensor in found.items())


def test_a_job_whose_disk_has_no_room_for_its_model_is_told_before_the_first_step(disk: Path, tmp_path: Path) -> None:
    _, run = make_run(tmp_path, "llama", disk / "run")
    (disk / "somebody's").write_bytes(bytes(DISK_BYTES - 16 * 2**20))
    trainer = Trainer(run, tmp_path / "log.txt", held_at=STEPS + 1)
    assert trainer.finish() == Exit.FAILED
    error = json.loads(run.error.read_text())
    assert error["code"] == "disk-full" and error["numbers"][0].startswith("needed ")
    assert not run.metrics.exists()

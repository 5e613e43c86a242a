"""Stands where worker/trainer.py does, for tests of the daemon: a process that keeps to the same contract, and trains
nothing. A step takes 20 ms; a checkpoint is a folder with the step in its name. What it makes depends on each step
since the first, so that one which is left out, or done twice, is seen in the end; two that have the GPU at once are
told of in the file `twice` of the state folder.

The job's `run_name` says what happens: "wrong" fails, "mortal" dies of SIGKILL at its third step, each time, "stubborn"
ignores SIGTERM but for the second, until there is a file `go` in the run folder, "held" waits after its 20th step for
that file or for a SIGTERM, "firm" for the file alone, "late" after its last step, "evaluated" evaluates at every second
step, "hungry" runs out of memory after its second step, with its checkpoint, as long as its budget is above 900 bytes,
"insatiable" always.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from planner.disk import check_space
from planner.errors import UserError
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from worker.training.metrics import Metrics

STEP_S = 0.02
HELD_AT = 20

folder = Path(sys.argv[1])
job = yaml.safe_load((folder / "resolved.yaml").read_text())
go = folder / "go"
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(time.time()))


def tell(**event: object) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def keep(parent: str, step: int) -> Path:
    path = folder / parent / f"step-{step}"
    if not path.exists():
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.mkdir(parents=True)
        (beside / "state").write_text(state)
        beside.rename(path)
    return path


def save(step: int) -> None:
    tell(event="checkpoint", step=step, path=str(keep("checkpoints", step)))


def wait_for_go(heeding: bool) -> None:
    while not (heeding and signals) and not go.exists():
        time.sleep(STEP_S)


def end(status: str, step: int, output: str | None = None) -> None:
    tell(
        event="end",
        step=step,
        status=status,
        output=output,
        step_s=STEP_S,
        measured_steps=step,
        gpu_peak_bytes=800,
        predicted_step_s=0.1,
        predicted_gpu_peak_bytes=900,
    )


gpu = (folder.parents[1] / "gpu").open("a")
try:
    fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    with (folder.parents[1] / "twice").open("a") as twice:
        twice.write(f"{folder.name}\n")
total = job["max_steps"]
saved = [path for parent in ("checkpoints", "trained") for path in folder.glob(f"{parent}/step-*")]
torn = [path for path in saved if (path / "state").exists() and (path / "state").stat().st_size < 64]
done = {int(path.name[5:]): path for path in saved if path not in torn}
first = max(done, default=0)
kept = done[first] / "state" if done else None
state = kept.read_text() if kept is not None and kept.exists() else ""
with (folder / "pids").open("a") as file:
    file.write(f"{os.getpid()}\n")
print(f"trainer here, from step {first}", flush=True)
Metrics(folder / "metrics.jsonl").close()  # cuts a torn line off
tell(event="start", step=first, total_steps=total, resumed_from=first or None, device="cpu")
if job["run_name"] == "evaluated":
    tell(event="rehearsed", step=0, tried="an evaluation, samples")
for step in range(first + 1, total + 1):
    time.sleep(STEP_S)
    state = hashlib.sha256(f"{state} {step}".encode()).hexdigest()
    tell(
        event="step",
        step=step,
        loss=5.0 / step,
        learning_rate=1e-4,
        grad_norm=None,
        step_s=STEP_S,
        tokens=64,
        gpu_peak_bytes=800,
    )
    if job["run_name"] == "evaluated" and step % 2 == 0:
        tell(event="eval", step=step, eval_loss=4.0 / step)
        tell(event="sample", step=step, prompt="Why?", text="So \x1b[31mit is")
    if job["run_name"] == "wrong":
        print("Traceback: it went wrong", flush=True)
        end("failed", step)
        sys.exit(1)
    if job["run_name"] in ("hungry", "insatiable") and step == first + 2:
        save(step)
        if job["run_name"] == "insatiable" or (job["gpu_budget"] or 1000) > 900:
            error = UserError("The GPU ran out of memory, although the plan should fit.", code="out-of-memory")
            RunFolder(folder).write_error(error)
            sys.exit(error.exit_code)
    if job["run_name"] == "mortal" and step == first + 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if job["run_name"] in ("held", "firm") and step == HELD_AT:
        wait_for_go(heeding=job["run_name"] == "held")
    if (disk := folder / "disk").exists() and step == HELD_AT:  # one whose room a checkpoint would need
        try:
            check_space(Path(disk.read_text()), 2**19, "the checkpoint")
        except UserError as error:
            RunFolder(folder).write_error(error)
            sys.exit(error.exit_code)
    if len(signals) > 1:
        end("stopped", step)
        sys.exit(75)
    stopping = signals and (job["run_name"] != "stubborn" or go.exists())
    if step % job["save_steps"] == 0 or stopping:
        save(step)
        if stopping:
            end("stopped", step)
            sys.exit(75)
if job["run_name"] == "late":
    keep("trained", total)
    wait_for_go(heeding=True)


def deliver() -> int:
    (folder / "output").mkdir(exist_ok=True)
    (folder / "output" / "model.safetensors").write_text(state)
    end("done", total, str(folder / "output"))
    return 0


sys.exit(exit_code_of(deliver, RunFolder(folder)))

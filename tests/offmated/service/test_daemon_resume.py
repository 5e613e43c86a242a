"""A job interrupted under the daemon, with the real planner and trainer, ends where an undisturbed one does."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

from planner.run.folder import RunFolder
from planner.run.processes import Process
from tests.support.daemons import PATIENCE_S, House, house, until
from tests.support.texts import sentences, tiny_llama_folder, write_jsonl

JOB = """
model: model
dataset: text.jsonl
max_length: 32
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 40
save_steps: 10
learning_rate: 1e-3
"""


def prepare(home: Path) -> None:
    """A Llama of two tiny layers, and its text."""
    tiny_llama_folder(home / "model")
    write_jsonl(home / "text.jsonl", sentences(40))


def halted_at(run: RunFolder, step: int, *, starts: int) -> Process:
    """The trainer that was started as number `starts`, standing still soon after `step`: at once, or a fast machine is
    done before it is disturbed."""

    def there() -> bool:
        events = run.read_metrics()
        begun = [number for number, event in enumerate(events) if event["event"] == "start"]
        last = events[begun[-1] :] if len(begun) == starts else []
        return any(event["event"] == "step" and event["step"] >= step for event in last)

    until(run.metrics.exists, "the first start", 240)
    until(there, f"step {step} of start {starts}", 240, every_s=0.005)
    trainer = Process.parse(run.process.read_text())
    trainer.send(signal.SIGSTOP)
    return trainer


def waits_for(process: Process, number: int) -> bool:
    """Whether a signal has been sent to a process that stands still."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (pending,) = re.findall(r"^ShdPnd:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


def undisturbed(house: House, run: RunFolder) -> Path:
    """The model that the trainer makes of the same job under the same plan, in one go and without a daemon."""
    alone = house.home / "alone"
    alone.mkdir()
    for file in (run.resolved, run.plan):
        shutil.copy(file, alone)
    command = [sys.executable, "-P", "-m", "worker.trainer", str(alone)]
    done = subprocess.run(command, env=house.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return alone / "output"


def test_a_killed_and_a_shut_down_run_end_with_the_weights_of_an_undisturbed_one() -> None:
    with house(real=True) as built:
        prepare(built.home)
        number = int(built.client.submit(JOB, str(built.home))["id"])
        run = RunFolder(built.paths.run_folder(number))
        halted_at(run, 15, starts=1).kill()
        trainer = halted_at(run, 25, starts=2)
        built.client.shutdown(wait=False)
        until(lambda: waits_for(trainer, signal.SIGTERM), "the trainer is told to stop")
        trainer.send(signal.SIGCONT)
        assert built.daemon is not None and built.daemon.wait(PATIENCE_S) == 0, built.log()
        built.up()
        until(lambda: built.job(number)["state"] in ("done", "failed"), "the end", 240)

        job, starts = built.job(number), [e for e in built.events(number) if e["event"] == "start"]
        assert (job["state"], job["attempts"], job["crashes"]) == ("done", 3, 0), "".join(built.client.logs(number))
        assert starts[1]["resumed_from"] >= 10 and starts[2]["resumed_from"] >= 25
        models = (Path(job["output"]), undisturbed(built, run))
        ours, theirs = (load_file(model / "model.safetensors") for model in models)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)

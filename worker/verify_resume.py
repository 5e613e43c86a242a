"""Checks that a job that is stopped and goes on learns what it would have learned in one go: the process of `offmate
verify-resume`, `python -m worker.verify_resume JOB --folder FOLDER [--run RUN_DIR] [--steps N] [--device cpu|cuda]
[--database URL]`.

JOB is a resolved job file, that of RUN_DIR if the job is submitted. FOLDER is an empty folder. Processes that run the
trainer's own code do the job's first steps twice: once without a stop, and once with a stop in the middle and a new
process after it. Both write a checkpoint at the end. The checkpoints, and the losses, norms and rates of all steps, are
compared bit by bit. Exit codes: 0 all is equal, 1 something is not, else those of `planner.errors`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from planner.environment import before_torch
from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly
from worker.training.metrics import read_metrics, steps_trained
from worker.training.stop import StopRequest

if TYPE_CHECKING:
    from planner.measure.repeatable import Kernels

log = logging.getLogger(__name__)

_COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens")
_MOST_NAMED = 5


def main(arguments: list[str]) -> int:
    """Run the command line; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m worker.verify_resume")
    parser.add_argument("job", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--database", metavar="URL")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in one line")
    parser.add_argument("--until", type=int, help="train the run folder JOB to this step, and stop")
    parser.add_argument("--refused", action="append", default=[], help="an operation without a deterministic kernel")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    before_torch()  # so torch is imported only below
    if options.until is not None:
        run, refused = RunFolder(options.job), tuple(options.refused)
        return exit_code_of(lambda: _train(run, options.until, refused), run)
    return exit_code_of(lambda: _verify(options), None)


class _Until(StopRequest):
    """Asks for a stop as soon as the run has done so many steps."""

    def __init__(self, run: RunFolder, steps: int) -> None:
        self._run, self._steps = run, steps
        super().__init__()

    @property
    def asked(self) -> bool:
        """Whether the steps are done."""
        return steps_trained(read_metrics(self._run.metrics)) >= self._steps

    @asked.setter
    def asked(self, value: bool) -> None:
        """Ignored: only the steps done ask for a stop."""


def _train(run: RunFolder, until: int, refused: tuple[str, ...] = ()) -> Exit:
    with lasting_imports():
        from planner.measure.repeatable import Kernels
        from worker.training.run import run_job

    with Kernels(refused).taken():  # two runs would differ anyway if kernels did not repeat
        return Exit.DONE if run_job(run, _Until(run, until)) else Exit.STOPPED


def _verify(options: argparse.Namespace) -> Exit:
    with lasting_imports():
        from planner.measure.repeatable import with_fallback
        from planner.measure.target import device_of

    job = Job.from_resolved(options.job)
    found, steps, kernels = with_fallback(lambda kernels: _compare(job, options, kernels), asked=job.deterministic)
    half, cuda = steps // 2, device_of(options.device).type == "cuda"
    if options.json:
        print(
            json.dumps(
                {
                    "equal": not found,
                    "steps": steps,
                    "stopped_after": half,
                    "differences": found,
                    "deterministic_kernels": cuda,
                    "kernels": str(kernels),
                    "refused": kernels.refused,
                }
            )
        )
        return Exit.FAILED if found else Exit.DONE
    did = f"steps 1 to {steps} in one go, and with an end after step {half} and a new process"
    if found:
        print(f"{did}, differ. Please report this.")
        for line in found[:_MOST_NAMED]:
            print(f"  {line}")
    else:
        print(f"{did}, are equal in every bit: losses, norms, weights and moments.")
    if cuda or kernels.refused:
        own = "" if job.deterministic else " Those that the job itself takes may differ from run to run."
        print(f"Kernels: {kernels}.{own}")
    return Exit.FAILED if found else Exit.DONE


def _compare(job: Job, options: argparse.Namespace, kernels: Kernels) -> tuple[list[str], int, Kernels]:
    """Do the steps both ways, with `kernels`. Returns the differences, how many steps there were, and `kernels`. Raises
    UserError."""
    from worker.training.stored import forget_stores

    whole, halves = (RunFolder(options.folder / name) for name in ("in-one-go", "with-a-stop"))
    try:
        steps = _prepare(job, (whole, halves), options, kernels)
        half = steps // 2
        log.info("training steps 1 to %d in one go", steps)
        _run(whole, steps, options.device, kernels)
        log.info("training %s, and a checkpoint", "step 1" if half == 1 else f"steps 1 to {half}")
        _run(halves, half, options.device, kernels)
        log.info("going on from it to step %d, in a new process", steps)
        _run(halves, steps, options.device, kernels)
        log.info("comparing the checkpoints of step %d", steps)
        return differences(whole, halves, steps), steps, kernels
    finally:
        for run in (whole, halves):
            if run.path.is_dir():
                forget_stores(job, run)


def _prepare(job: Job, runs: tuple[RunFolder, ...], options: argparse.Namespace, kernels: Kernels) -> int:
    """Make the run folders, with plan and data; returns how many steps there are to do. Raises UserError."""
    from planner.cache.store import Cache
    from planner.measure.target import device_of
    from worker.certify.its_plan import its_plan
    from worker.training.stored import clear_passing, passing_token

    cache = Cache(options.database) if options.database else None
    first, *others = runs
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)  # left by a try with kernels that an operation refused
    submitted = RunFolder(options.run) if options.run else None
    found = its_plan(job, submitted, device_of(options.device), first.path / "data", cache, anew=bool(kernels.refused))
    job, batches = _to_compare(found.job), found.batches
    if (total := batches.total_steps) < 3:
        raise UserError(
            "The job is too short to be stopped within.",
            code="too-few-steps",
            exit_code=Exit.USAGE,
            numbers=(f"steps {total}, needed 3",),
            hint="give a job with more data or a larger max_steps",
        )
    for run in others:
        shutil.copytree(first.path, run.path)
    clear_passing(job)
    for run in runs:
        (run.path / "token").write_text(passing_token(), "utf-8")
        run.write_resolved(job.resolved_yaml())
        run.write_plan(found.document)
    return max(2, min(int(options.steps), total - 1))


def _to_compare(job: Job) -> Job:
    """The job without samples, early stopping and output folder: only what is learned counts, the steps alone end it,
    and a model that it has written is not written over."""
    return job.model_copy(update={"output_dir": None, "sample_prompts": None, "early_stopping_patience": None})


def _run(run: RunFolder, until: int, device: str | None, kernels: Kernels) -> None:
    refused = [f"--refused={operation}" for operation in kernels.refused]
    command = [sys.executable, "-P", "-m", "worker.verify_resume", str(run.path), f"--until={until}", *refused]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    watched = sys.stderr.isatty()  # if not, its log is shown where it ends badly
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if watched else subprocess.PIPE,
        stderr=None if watched else subprocess.STDOUT,
        env={**os.environ, **hidden},
        text=True,
        errors="replace",
        check=False,
    )
    if (code := done.returncode) != Exit.STOPPED:
        from planner.measure.repeatable import NotRepeatableError

        told = run.read_error()
        if told is not None and (error := NotRepeatableError.of(UserError.from_json(told))) is not None:
            raise error
        print(done.stdout or "", end="", file=sys.stderr)
        raise UserError(
            "The steps could not be done.",
            code="steps-not-done",
            numbers=(f"exit code {code}, and the reason above",),
            hint="what is above would end the job, too",
        )


def differences(one: RunFolder, other: RunFolder, step: int) -> list[str]:
    """The differences between two runs after step `step`, a line each: in their steps as written down, and in every
    tensor of their checkpoints, bit by bit."""
    import torch

    from worker.storage.checkpoint import read_checkpoint

    told = [
        [tuple(event[key] for key in _COMPARED) for event in read_metrics(run.metrics) if event["event"] == "step"]
        for run in (one, other)
    ]
    lines = [f"step {a[0]}: {a[1:]}, with a stop {b[1:]}" for a, b in zip(*told, strict=True) if a != b]
    first, second = (read_checkpoint(run.checkpoints / f"step-{step}") for run in (one, other))
    theirs = dict(second.tensors())
    for name, parts in first.tensors():
        found = theirs.pop(name, {})
        lines += [
            f"{name}: {part}"
            for part, tensor in parts.items()
            if part not in found or not torch.equal(tensor.view(torch.uint8), found[part].view(torch.uint8))
        ]
    return lines + [f"{name}: it is there with a stop only" for name in theirs]


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

"""Checks that a job that is stopped and resumed learns exactly what it would have learned without the stop.

Processes that run the trainer's own code (`train-until`) do the job's first steps twice: once without a stop, and once
with a stop in the middle and a new process after it. Both write a checkpoint at the end. The checkpoints, and the
losses, norms and rates of all steps, are compared bit by bit."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from planner.errors import Exit, UserError
from planner.job.schema import Job
from planner.measure.repeatable import Kernels, NotRepeatableError, with_fallback
from planner.measure.target import device_of
from planner.run.folder import RunFolder
from worker.check.its_plan import its_plan
from worker.storage.checkpoint import read_checkpoint
from worker.storage.shards import Item
from worker.training.metrics import read_metrics
from worker.training.stored import clear_passing, forget_stores, passing_token

log = logging.getLogger(__name__)

_COMPARED = ("step", "loss", "grad_norm", "learning_rate", "tokens")
_MOST_NAMED = 5


def answer(job: Job, options: argparse.Namespace) -> tuple[Exit, str]:
    """Check whether a stop and a resume change the job's numbers. Returns the answer in words or as JSON, with exit
    code 1 where something differs. Raises UserError."""
    found, steps, kernels = with_fallback(lambda kernels: _compare(job, options, kernels), required=job.deterministic)
    code, half, cuda = Exit.FAILED if found else Exit.DONE, steps // 2, device_of(options.device).type == "cuda"
    if options.json:
        told = {
            "equal": not found,
            "steps": steps,
            "stopped_after": half,
            "differences": found,
            "deterministic_kernels": cuda,
            "kernels": str(kernels),
            "refused": kernels.refused,
        }
        return code, json.dumps(told)
    did = f"steps 1 to {steps} in one go, and with an end after step {half} and a new process"
    lines = [f"{did}, are equal in every bit: losses, norms, weights and moments."]
    if found:
        lines = [f"{did}, differ. Please report this.", *(f"  {line}" for line in found[:_MOST_NAMED])]
    if cuda or kernels.refused:
        own = "" if job.deterministic else " Those that the job itself takes may differ from run to run."
        lines.append(f"Kernels: {kernels}.{own}")
    return code, "\n".join(lines)


def _compare(job: Job, options: argparse.Namespace, kernels: Kernels) -> tuple[list[str], int, Kernels]:
    """Do the steps both ways, with `kernels`. Returns the differences, how many steps there were, and `kernels`. Raises
    UserError."""
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
    first, *others = runs
    for run in runs:
        shutil.rmtree(run.path, ignore_errors=True)  # left by a try with kernels that an operation refused
    device, data = device_of(options.device), first.path / "data"
    found = its_plan(job, options.run, device, data, options.database, anew=bool(kernels.refused))
    job, batches = _to_compare(found.job), found.batches
    if (total := batches.total_steps) < 3:
        raise UserError(
            "The job is too short for a stop in its middle.",
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
    command = [sys.executable, "-P", "-m", "worker.check", "train-until", str(run.path), str(until), *refused]
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
    """The differences between two runs after step `step`, a line of text each: in the losses, norms and rates that they
    recorded, and in every tensor of their checkpoints, bit by bit."""
    told = [
        [tuple(event[key] for key in _COMPARED) for event in read_metrics(run.metrics) if event["event"] == "step"]
        for run in (one, other)
    ]
    lines = [f"step {a[0]}: {a[1:]}, with a stop {b[1:]}" for a, b in zip(*told, strict=True) if a != b]
    theirs = dict(_tensors(other, step))
    for name, parts in _tensors(one, step):
        found = theirs.pop(name, {})
        lines += [
            f"{name}: {part}"
            for part, tensor in parts.items()
            if part not in found or not torch.equal(tensor.view(torch.uint8), found[part].view(torch.uint8))
        ]
    return lines + [f"{name}: it is there with a stop only" for name in theirs]


def _tensors(run: RunFolder, step: int) -> Iterator[Item]:
    """The tensors of the run's checkpoint of `step`, with the frozen weights that it builds on."""
    checkpoint = read_checkpoint(run.checkpoints / f"step-{step}")
    yield from itertools.chain(checkpoint.tensors(), checkpoint.frozen_tensors())

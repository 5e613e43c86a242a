"""Asks about a job from Python: how it would run, and whether its numbers are plain PyTorch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from offmate.job_plan import JobPlan
from planner.codec import from_json
from planner.errors import UserError, check_linux
from planner.reports.certificate import Certificate

_T = TypeVar("_T")
_TAIL = 20  # lines of a process's stderr that an error repeats

AnyJob = str | os.PathLike[str] | Mapping[str, object]
"""A job: the path of a job file, or a mapping with the keys of one."""


def plan(job: AnyJob, *, hardware: str | os.PathLike[str] | None = None) -> JobPlan:
    """How `job` would run on this machine, or on another one.

    `job` is the path of a job file (offmate's own, or one of axolotl, LLaMA-Factory or TRL), or a mapping with the keys
    of one; relative paths in a mapping start at the current folder. `hardware` is the name of a card, such as
    "rtx3060" (`offmate plan --hardware list` shows all), or the path of a machine's file. None is this machine.

    On this machine the job is checked as at its submission, its data are counted, and a plan that is kept from
    measurements is taken. Nothing is measured, so without such a plan times are estimated; a GPU is not touched. For
    another machine the model's config is enough: no weights and no data are read.

    A job that does not fit is an answer (`JobPlan.fits`), not an error. Raises UserError for a mistake in the job, a
    model that cannot be used, and a machine that is not known. Raises TypeError for a mapping with values that a job
    file cannot hold.

    For example:

        answer = offmate.plan("job.yaml", hardware="rtx3060")
        print(answer.fits, answer.step_s, answer.tokens_per_s)
    """
    machine = None if hardware is None else os.fspath(hardware)
    if machine is None:
        check_linux()
    return _answered(JobPlan, job, {"ask": "plan", "hardware": machine})


def certify(
    job: AnyJob, *, steps: int = 5, layers: int | None = None, device: Literal["cpu", "cuda"] | None = None
) -> Certificate:
    """Do the first `steps` steps of `job` under its plan and in plain PyTorch, and compare all numbers.

    `job` is as in `plan`. `layers`: compare only so many of the model's first layers; by default as many as plain
    PyTorch has room for. `device`: where to compute; by default on CUDA if there is a CUDA device. The job's blocks are
    measured first, as when a job starts, so no job should run meanwhile.

    Returns the certificate that `offmate certify --json` shows. `certificate.holds` is False where a difference is
    greater than allowed; `certificate.bitwise` is True where all numbers are equal in every bit. Raises UserError for a
    mistake in the job and where something does not fit, and ValueError for less than one step or layer.

    For example:

        certificate = offmate.certify("job.yaml", steps=3)
        print(certificate.bitwise)
    """
    if steps < 1 or (layers is not None and layers < 1):
        raise ValueError("steps and layers are at least 1")
    check_linux()
    question = {"ask": "certify", "steps": steps, "layers": layers, "device": device}
    return _answered(Certificate, job, question)


def _answered(kind: type[_T], job: AnyJob, question: Mapping[str, object]) -> _T:
    """Have a process of its own (`offmate.child`) answer the question, and return its answer as a `kind`."""
    from offmated.cli.planner_process import run_child  # late: importing it takes longer than all else here

    asked = {**question, **_source(job)}
    with tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        folder = Path(scratch)
        (folder / "question.json").write_text(json.dumps(asked), "utf-8")
        command = [sys.executable, "-P", "-m", "offmate.child", scratch]
        done = run_child(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if (answer := folder / "answer.json").exists():
            return from_json(kind, json.loads(answer.read_text("utf-8")))
        if (error := folder / "error.json").exists():
            raise UserError.from_json(json.loads(error.read_text("utf-8")))
    last = "\n".join(done.stderr.splitlines()[-_TAIL:])
    raise RuntimeError(f"the process that answers ended with exit code {done.returncode}:\n{last}")


def _source(job: AnyJob) -> dict[str, str]:
    """Where the other process finds the job: the file, or the text that has the keys of a mapping and its folder."""
    if not isinstance(job, Mapping):
        return {"file": str(Path(job).absolute())}
    try:
        text = yaml.safe_dump(_plain(job), sort_keys=False, allow_unicode=True)
    except yaml.representer.RepresenterError as error:
        raise TypeError(f"a job's keys hold numbers, texts, lists and mappings of these: {error}") from None
    return {"text": text, "folder": str(Path.cwd())}


def _plain(value: object) -> object:
    """The value with paths as texts, and the dicts and lists that YAML knows in place of others of their kind."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value

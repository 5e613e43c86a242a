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
_DEVICES = ("cpu", "cuda")

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
    model that cannot be used, and a machine that is not known. Raises TypeError for a mapping with values other than
    texts, numbers, True, False, None, paths, and lists, tuples and mappings of these; and ValueError for an empty name
    of a machine.

    For example:

        answer = offmate.plan("job.yaml", hardware="rtx3060")
        print(answer.fits, answer.step_s, answer.tokens_per_s)
    """
    machine = None if hardware is None else os.fspath(hardware)
    if machine == "":
        raise ValueError("hardware is empty; give a card's name, such as \"rtx3060\", a machine's file, or None")
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
    mistake in the job and where something does not fit, ValueError for less than one step or layer and for another
    device, and TypeError as `plan` does.

    For example:

        certificate = offmate.certify("job.yaml", steps=3)
        print(certificate.bitwise)
    """
    if steps < 1 or (layers is not None and layers < 1):
        raise ValueError("steps and layers are at least 1")
    if device is not None and device not in _DEVICES:
        raise ValueError(f"device is {device!r}; it must be {' or '.join(map(repr, _DEVICES))}")
    check_linux()
    question = {"ask": "certify", "steps": steps, "layers": layers, "device": device}
    return _answered(Certificate, job, question)


def _answered(kind: type[_T], job: AnyJob, question: Mapping[str, object]) -> _T:
    """Have a process of its own (`offmate.child`) answer the question, and return its answer as a `kind`.

    The child's stdin is a pipe to which nothing is written. It is closed when this process ends, however it ends, or
    leaves here with an exception: then the child ends, too.
    """
    asked = {**question, **_source(job)}
    with tempfile.TemporaryDirectory(prefix="offmate-") as scratch:
        folder = Path(scratch)
        (folder / "question.json").write_text(json.dumps(asked), "utf-8")
        command = [sys.executable, "-P", "-m", "offmate.child", scratch]
        with (
            (folder / "stderr").open("wb") as errors,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors) as child,
        ):
            assert child.stdin is not None
            try:
                child.wait()
            finally:
                child.stdin.close()
                child.wait()  # it removes its temporary folders first
        if (answer := folder / "answer.json").exists():
            return from_json(kind, json.loads(answer.read_text("utf-8")))
        if (error := folder / "error.json").exists():
            raise UserError.from_json(json.loads(error.read_text("utf-8")))
        last = "\n".join((folder / "stderr").read_text("utf-8", "replace").splitlines()[-_TAIL:])
    raise RuntimeError(f"the process that answers ended with exit code {child.returncode}:\n{last}")


def _source(job: AnyJob) -> dict[str, str]:
    """Where the other process finds the job: the file, or the text that has the keys of a mapping and its folder."""
    if not isinstance(job, Mapping):
        return {"file": str(Path(job).absolute())}
    if wrong := [key for key in job if not isinstance(key, str)]:
        raise TypeError(f"a job's keys are texts, not {type(wrong[0]).__name__}")
    text = yaml.dump(_plain(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return {"text": text, "folder": str(Path.cwd())}


class _Dumper(yaml.SafeDumper):
    """Writes each text in quotes, as without them the reader of job files reads more texts as numbers than PyYAML
    knows, such as 1e5. Not JSON: it escapes other characters than YAML, and has no names for infinity and NaN."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _plain(value: object) -> object:
    """The value with the types that YAML knows in place of others of their kind, and paths as texts. Raises TypeError
    for a value that a job file cannot hold."""
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # `str()` of a member of an Enum is its name
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    kinds = "texts, numbers, True, False, None, paths, lists and mappings"
    raise TypeError(f"a job's values are {kinds}, not {type(value).__name__}")


def _plain_key(key: object) -> object:
    """The key of a mapping inside a job: a text or a whole number."""
    if isinstance(key, str | int):
        return _plain(key)
    raise TypeError(f"the keys of mappings in a job are texts and whole numbers, not {type(key).__name__}")

"""Defines `offmate certify`, which does a job's first steps under offmate and in plain PyTorch, and `offmate
verify-resume`, which does them with a stop and without. Both compute in a process of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from offmated.cli.client import Client
from offmated.cli.output import JobNumber, change_options, console, json_option, pairs, print_json, table
from offmated.cli.plan_view import option_runs
from offmated.cli.remote import only_here
from offmated.paths import Paths
from planner.codec import from_json
from planner.errors import Exit, UserError, check_linux
from planner.reports.certificate import Certificate, Finding
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.units import counted, format_bytes, format_bytes_down

_NOT_FINITE = 1e300
_FOLDER = ".certify-"


_SUBJECT = click.argument("what", metavar="FILE|ID")


@click.command()
@_SUBJECT
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="How many steps.")
@click.option("--layers", type=click.IntRange(min=1), help="Compare only this many of the model's first layers.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to compute.")
@change_options
@json_option
def certify(what: str, as_json: bool, **options: Any) -> None:
    """Run the first steps of the job in FILE, or of job ID, under its plan and in plain PyTorch, and show the greatest
    differences. Exits with 1 when one is greater than allowed. If the model does not fit in plain PyTorch, only its
    first layers are compared."""
    code, answer = _compare(what, options)
    print_json(answer) if as_json else console().print(_view(what, from_json(Certificate, answer)))
    sys.exit(code)


@click.command("verify-resume")
@_SUBJECT
@click.option("--steps", type=click.IntRange(min=2), default=6, show_default=True, help="How many steps.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where to compute.")
@change_options
@json_option
def verify_resume(what: str, as_json: bool, **options: Any) -> None:
    """Run the first steps of the job in FILE, or of job ID, in one go, and again with a stop and a new process in
    between. Compares them bit by bit and exits with 1 when a bit differs. Both runs use deterministic kernels."""
    with _process("verify-resume", what, options, ("steps", "device")) as command:
        code = answered([*command, *(["--json"] if as_json else [])], as_json)
    sys.exit(code)


def answered(command: list[str], as_json: bool) -> int:
    """Run the process `command`, print its answer, and return its exit code. The process writes its answer to stdout:
    text for people or, with `as_json`, JSON in the last line."""
    if not as_json:
        code = subprocess.call(command, stdin=subprocess.DEVNULL)
    else:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        code = done.returncode
        if done.stdout.strip():  # else the process has said why on stderr
            print_json(json.loads(done.stdout.splitlines()[-1]))
    return code if code >= 0 else Exit.FAILED


def _compare(subject: str, options: dict[str, Any]) -> tuple[int, object]:
    """Exit code and certificate. Without a certificate the process has said why on stderr, and this raises
    `click.exceptions.Exit` with its exit code."""
    with _process("certify", subject, options, ("steps", "layers", "device")) as command:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise click.exceptions.Exit(done.returncode if done.returncode > 0 else Exit.FAILED)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@contextmanager
def _process(check: str, subject: str, options: dict[str, Any], handed_on: tuple[str, ...]) -> Iterator[list[str]]:
    """The command that does a `check` of the job in a file or with a number, with a temporary folder."""
    from offmated.cli import planner_process  # late: importing it takes half of a command's start

    check_linux()
    state = Paths.from_environment().state
    with (
        _job(subject, options) as job,
        own_folder(state if state.is_dir() else None) as folder,
    ):
        url = planner_process.database()
        words = [f"--{name}={options[name]}" for name in handed_on if options[name] is not None]
        known = [f"--database={url}"] if url else []
        yield [sys.executable, "-P", "-m", "worker.check", check, *job, f"--folder={folder}", *words, *known]


@contextmanager
def _job(subject: str, options: dict[str, Any]) -> Iterator[list[str]]:
    """The words that name the job to a process. A submitted job is taken as it is, so options that change it are
    refused. Raises UserError."""
    from offmated.cli import planner_process

    if not subject.isdigit():
        with planner_process.resolved(planner_process.job_of(Path(subject), options)) as path:
            yield [str(path)]
        return
    number = JobNumber().convert(subject, None, None)
    only_here("The number of a job")
    changes = {"gpu_budget": "--gpu-budget", "cpu_budget": "--cpu-budget", "settings": "--set", "device": "--device"}
    if changed := [option for name, option in changes.items() if options[name]]:
        raise UserError(
            f"Job {number} is taken as it was submitted, with its plan.",
            code="usage",
            exit_code=Exit.USAGE,
            numbers=(f"{changed[0]} asks about another",),
            hint=f"leave {changed[0]} out, or give the job's file in place of {number}",
        )
    run = RunFolder(Path(Client(Paths.from_environment()).job(number)["run_dir"]))
    yield [str(run.resolved), f"--run={run.path}"]


@contextmanager
def own_folder(state: Path | None) -> Iterator[str]:
    """A temporary folder in the folder `state`, as a copy of the trained weights may be too large for /tmp; in /tmp
    where `state` is None. Folders left by killed commands are removed first."""
    for abandoned in state.glob(f"{_FOLDER}*") if state is not None else ():
        try:
            owner = Process.parse(abandoned.name.removeprefix(_FOLDER).rpartition("-")[0].replace("_", ":"))
        except ValueError:  # not named by us
            continue
        if not owner.alive():
            shutil.rmtree(abandoned, ignore_errors=True)
    name = str(Process.current()).replace(":", "_")  # some programs do not take paths with colons
    with tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{name}-", dir=state) as folder:
        yield folder


def _view(subject: str, certificate: Certificate) -> RenderableType:
    name = f"job {subject}" if subject.isdigit() else Path(subject).name
    steps, slices = counted(certificate.steps, "step"), counted(certificate.slices, "slice")
    head = f"{name}: {steps} of {slices}, {certificate.device}, "
    rows = [
        [f.what, _number(f.greatest), _place(f), _number(f.size), f"{f.equal} of {f.count}"]
        for f in certificate.findings
    ]
    columns = ("", "greatest difference", "in", "of at most", "equal in every bit")
    verdict = Text(_verdict(certificate), style="green" if certificate.holds else "red")
    return Group(
        head + _model(certificate),
        pairs(list(_plan(subject, certificate))),
        Text(),
        table(columns, rows),
        Text(),
        verdict,
    )


def _model(certificate: Certificate) -> str:
    if certificate.layers == certificate.all_layers:
        return f"the whole model ({counted(certificate.layers, 'layer')})"
    return f"the first {certificate.layers} of {counted(certificate.all_layers, 'layer')}"


def _plan(subject: str, certificate: Certificate) -> Iterator[tuple[str, str | Text]]:
    peak, budget = format_bytes(certificate.gpu_peak_bytes), format_bytes_down(certificate.gpu_budget_bytes)
    yield "memory", f"{peak} at most under a budget of {budget}"
    whole = " for the whole model" if certificate.layers < certificate.all_layers else ""
    yield (
        "plain",
        f"about {format_bytes(certificate.plain_bytes)}{whole}; there are {format_bytes(certificate.there_bytes)}",
    )
    yield "plan", " · ".join(option_runs(certificate.options))
    yield "made", _made(subject, certificate)
    if certificate.refused or certificate.device != "cpu":
        yield "kernels", certificate.kernels + ("" if certificate.decided else "; the plan was measured in them")
    yield (
        "moved",
        f"{format_bytes(certificate.moved_bytes)} a step; the CPU updates {counted(certificate.cpu_updated, 'tensor')}",
    )


def _made(subject: str, certificate: Certificate) -> str:
    """When and for what the plan was made, in words."""
    if certificate.layers < certificate.all_layers:
        return "for these layers, with memory as tight as in the job's own plan"
    if certificate.decided:
        return f"earlier: it is the plan under which job {subject} trains"
    if certificate.other_kernels:
        return (
            f"now, for strict kernels: job {subject} trains under a plan for faster ones, which need less scratch "
            "memory"
        )
    if subject.isdigit():
        return f"now, as job {subject} gets it when it has its turn and the same memory is free"
    return "now, as a job of this file gets it; offmate certify ID has the plan of one that is submitted"


def _place(finding: Finding) -> str:
    return finding.at if finding.greatest else ""


def _number(value: float) -> str:
    return "not finite" if value >= _NOT_FINITE else f"{value:.3g}"


def _verdict(certificate: Certificate) -> str:
    plain = (
        "plain PyTorch, rounding AdamW's moments to 8 bits after each update,"
        if certificate.rounded
        else "plain PyTorch"
    )
    if certificate.bitwise:
        return f"offmate computes what {plain} computes, bit for bit."
    does = "computes within rounding" if certificate.holds else "does not compute"
    allowed = "no difference is allowed."
    if certificate.reasons:
        allowed = (
            f"{'; '.join(certificate.reasons)}. In the first step losses and norm differ by "
            f"{_number(certificate.first)} of their size, {_number(certificate.allowed)} is allowed."
        )
    report = "" if certificate.holds else " Please report this."
    return f"offmate {does} what {plain} computes: {allowed}{report}"

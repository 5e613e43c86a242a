"""Answers one question of `offmate.questions` in a process of its own: `python -m offmate.child FOLDER`.

FOLDER has the question in question.json; the answer goes to answer.json there, an error for people to error.json. A
process of its own, because planning starts further processes, and a certificate sets kernels and memory for good. It
ends when its stdin, a pipe from the process that asks, is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from offmate.job_plan import JobPlan
from offmated.cli.certify import own_folder
from offmated.cli.planner_process import check_as_submitted, count_rows, database, machine_computes_bf16, resolved
from offmated.paths import Paths, traces_folder
from planner.codec import from_json, to_json
from planner.commands.parser import machine_for
from planner.counted import Counted
from planner.environment import before_torch
from planner.errors import Exit, UserError
from planner.fast_imports import lasting_imports
from planner.job.schema import Job
from planner.keys.source import read_text
from planner.machine.hardware import Hardware
from planner.picture.basis import Basis
from planner.picture.files import Pictures
from planner.reports.receipt import Receipt
from planner.run.ending import exit_code_of, leaving_on_signals
from planner.run.folder import RunFolder
from planner.run.plain_streams import speak_plainly
from planner.schedule.chain import Chain
from planner.schedule.measured import Measured
from planner.schedule.plan import Plan
from planner.units import format_bytes, format_bytes_down

NAME = "The job"
"""What errors call a job that is a mapping."""
_END_S = 5.0
"""The seconds that this process has, when nobody waits for its answer any more, to remove its temporary folders."""


def main(arguments: list[str]) -> int:
    """Answer the question in the folder `arguments[0]`; returns the exit code."""
    (path,) = arguments
    folder = RunFolder(Path(path))
    pipe = os.dup(0)  # libraries and further processes get an empty stdin
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    with leaving_on_signals():
        threading.Thread(target=_end_after, args=(pipe, folder.path), daemon=True).start()
        return exit_code_of(lambda: _answer(folder.path), folder)


def _end_after(pipe: int, folder: Path) -> None:
    """Wait until the process that asked closes the pipe or ends; then end this process, as nobody waits for its answer
    any more."""
    os.read(pipe, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_S)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def _answer(folder: Path) -> Exit:
    question = json.loads((folder / "question.json").read_text("utf-8"))
    if question["ask"] == "certify":
        answer: object = _certificate(question)
    elif question["hardware"] is None:
        answer = to_json(_here(*_text(question)))
    else:
        answer = to_json(_elsewhere(*_text(question), question["hardware"]))
    (folder / "answer.json").write_text(json.dumps(answer), "utf-8")
    return Exit.DONE


def _text(question: dict[str, Any]) -> tuple[str, Path, str]:
    """The text of the job file, the folder where its relative paths start, and its name in errors."""
    if "text" in question:
        return question["text"], Path(question["folder"]), NAME
    file = Path(question["file"])
    return read_text(file), file.parent, file.name


def _read(parse: Callable[..., Job], text: str, folder: Path, name: str, **how: Any) -> Job:
    """The job that `parse` makes of the text. Errors about a mapping do not speak of a file and its lines."""
    if name != NAME:
        return parse(text, folder, name=name, **how)
    try:
        return parse(text, folder, name=name, in_lines=False, **how)
    except UserError as error:
        hint = "correct the job and try again; `offmate keys` lists all keys"
        if error.code == "file-too-long":
            hint = "give a file's path in place of a long text, a folder's in place of many files"
        raise UserError(
            error.what, code=error.code, numbers=error.numbers, hint=hint, exit_code=error.exit_code
        ) from None


def _here(text: str, folder: Path, name: str) -> JobPlan:
    """The plan on this machine, as `offmate plan FILE` makes it."""
    job = _read(Job.parse, text, folder, name)
    try:
        return _planned_here(job, folder)
    except UserError as error:
        if error.exit_code is not Exit.DOES_NOT_FIT:
            raise
        return _too_large_here(job, error)


def _planned_here(job: Job, folder: Path) -> JobPlan:
    check_as_submitted(job, folder)
    with resolved(job) as path:
        rows, planned_for = count_rows(job, path)
    before_torch()
    with lasting_imports():  # torch takes seconds to import: mistakes in the job come before that
        from planner.cache.store import Cache
        from planner.commands.plan_job import plan_job
        from planner.measure.target import device_of

    url, counted = database(), None if rows is None else from_json(Counted, rows)
    answer = plan_job(job, device_of(None), cache=Cache(url) if url else None, measure=False, counted=counted)
    if answer.disk is not None:
        answer.disk.check()
    return _of_plan(
        answer.plan,
        answer.chain,
        answer.hardware,
        rows=answer.rows,
        measured=answer.measured,
        notes=(planned_for, *filter(None, (answer.reference,))),
    )


def _too_large_here(job: Job, error: UserError) -> JobPlan:
    with lasting_imports():
        from planner.measure.target import device_of, find_target
        from planner.models.hf_model import working_dtype

    machine = find_target(device_of(None), working_dtype(job), measure=False).machine
    return JobPlan(
        fits=False,
        why_not="\n".join((error.what, *error.numbers)),
        hardware=machine.name,
        gpu_budget_bytes=job.gpu_budget or machine.gpu_bytes,
        cpu_budget_bytes=job.cpu_budget or machine.cpu_bytes,
    )


def _elsewhere(text: str, folder: Path, name: str, hardware: str) -> JobPlan:
    """The plan on a machine that is named, as `offmate plan FILE --hardware NAME` makes it."""
    bf16 = machine_computes_bf16({"hardware": hardware})
    job = _read(Job.question, text, folder, name, machine_bf16=bf16)
    machine = machine_for(job, argparse.Namespace(hardware=hardware, cpu_memory=None, link=None, drive=None))
    before_torch()
    with lasting_imports():
        from planner.commands.ask import ask
        from planner.commands.kept_traces import Traces

    made = _Made()
    receipt = ask(job, machine, pictures=made, traces=Traces(traces_folder()), helps=False)
    if not made.plans:
        return _too_large(receipt)
    ((plan, chain),) = made.plans
    return _of_plan(plan, chain, machine, rows=receipt.asked.rows, measured=False, notes=receipt.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made(Pictures):
    """Keeps the plan that `ask` gives to be drawn, in `plans`; nothing is drawn."""

    plans: list[tuple[Plan, Chain]] = field(default_factory=list)

    def write(
        self,
        plan: Plan,
        chain: Chain,
        hardware: Hardware,
        *,
        title: str,
        basis: Basis = Basis.ESTIMATED,
        measured: Measured | None = None,
    ) -> None:
        """Keep the plan and its chain."""
        self.plans.append((plan, chain))


def _of_plan(
    plan: Plan, chain: Chain, hardware: Hardware, *, rows: int, measured: bool, notes: tuple[str, ...]
) -> JobPlan:
    tokens = plan.rounds * plan.slices * chain.slice_tokens
    return JobPlan(
        fits=True,
        hardware=hardware.name,
        measured=measured,
        step_s=plan.step_s,
        bound_s=plan.bound_s,
        tokens_per_step=tokens,
        tokens_per_s=tokens / plan.step_s,
        gpu_bytes=plan.gpu_peak_bytes,
        cpu_bytes=plan.cpu_peak_bytes,
        gpu_budget_bytes=plan.gpu_budget_bytes,
        cpu_budget_bytes=plan.cpu_budget_bytes,
        rows=rows,
        micro_batches=plan.rounds * plan.slices,
        options=plan.options,
        stages=tuple(map(str, plan.stages)),
        notes=notes,
    )


def _too_large(receipt: Receipt) -> JobPlan:
    """The answer for a job that does not fit another machine."""
    lines = [
        f"{memory}: at least {format_bytes(least)} needed, the budget is {format_bytes_down(budget)}"
        for memory, least, budget in (
            ("GPU memory", receipt.least_gpu_budget_bytes, receipt.gpu_budget_bytes),
            ("host memory", receipt.least_cpu_budget_bytes, receipt.cpu_budget_bytes),
        )
        if least is not None and least > budget
    ]
    return JobPlan(
        fits=False,
        why_not="\n".join(("No plan fits these budgets.", *lines)),
        hardware=receipt.hardware.name,
        gpu_budget_bytes=receipt.gpu_budget_bytes,
        cpu_budget_bytes=receipt.cpu_budget_bytes,
        notes=receipt.notes,
    )


def _certificate(question: dict[str, Any]) -> object:
    """The certificate as `offmate certify FILE --json` shows it."""
    text, folder, name = _text(question)
    job = _read(Job.parse, text, folder, name)
    before_torch()
    with lasting_imports():
        from worker.check.certificate import answer

    state = Paths.from_environment().state
    with own_folder(state if state.is_dir() else None) as scratch:
        options = argparse.Namespace(
            steps=question["steps"],
            layers=question["layers"],
            device=question["device"],
            run=None,
            database=database(),
            folder=Path(scratch),
        )
        return json.loads(answer(job, options)[1])


if __name__ == "__main__":
    speak_plainly()
    sys.exit(main(sys.argv[1:]))

"""Checks the files that a job names, in a process of its own: the daemon itself opens no data files of users."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from offmated.paths import Paths
from planner.errors import Errors, Exit, UserError
from planner.job.schema import Job
from planner.machine.this_machine import check_budgets_here
from planner.run.bounds import ended_by
from planner.run.folder import RunFolder
from planner.run.oom import kills

LOOK_S = 60.0
"""The most seconds for a check. A few are enough, unless the hub is slow."""
LEFT = "the job could not be looked at: what is wrong with it is told when it has its turn"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables of the checking process. Without them the stacks of threads and the reserves of memory pools
would count as used memory."""


def look_at(run: RunFolder, folder: Path | None = None) -> tuple[str, ...]:
    """Check the job in `run` in a process of its own. Raises one UserError with all errors that would end the job
    because of its weights, its data, its model or its first records. Returns notes to the user. `folder`: the folder of
    the job file, to suggest similar names. Where no answer comes, as with a slow hub, the check is left to the job's
    turn, and a note says so."""
    words = ["first-records", str(run.path), *([str(folder)] if folder else [])]
    command = [sys.executable, "-P", "-m", "worker.check", *words]
    killed_before = kills()
    try:
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LOOK_S,
            check=False,
            env={**os.environ, **_ENVIRONMENT},
        ).returncode
    except subprocess.TimeoutExpired:
        code = int(Exit.FAILED)
    error, notes = run.read_error(), run.read_first_notes()
    at = run.looks_at.read_text("utf-8") if run.looks_at.exists() else "the job"
    for path in (run.error, run.first_notes, run.looks_at):
        path.unlink(missing_ok=True)
    if error is not None:
        raise UserError.from_json(error)
    if code < 0 and (ended := ended_by(-code, at, kernel_kills=kills() > killed_before)) is not None:
        raise ended
    return (LEFT,) if code != Exit.DONE or notes is None else notes


def check_here(job: Job, paths: Paths, wrong: Errors) -> Job:
    """Add to `wrong` the errors for which this machine refuses a job before any of its files is opened: in its budgets,
    and in folders that are inside offmate's own. Returns the job to check further, without its budgets where these are
    refused."""
    looked_at = without_budgets(job)
    with wrong.apart():
        check_budgets_here(job.gpu_budget, job.cpu_budget)
        looked_at = job
    with wrong.apart():
        if job.output_dir is not None:
            paths.check_outside("output_dir:", Path(job.output_dir))
    with wrong.apart():
        for disk in job.disk_paths or ():
            paths.check_outside("disk_paths:", Path(disk), may_hold=True)
    return looked_at


def without_budgets(job: Job) -> Job:
    """A copy of the job without memory budgets of its own, so that the machine's defaults hold."""
    return job.model_copy(update={"gpu_budget": None, "cpu_budget": None})

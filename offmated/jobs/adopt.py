"""Finds run folders that the database does not know, for example after it was lost, and makes jobs of them again."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from offmated.jobs.states import Hold, JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import name_of, window_of
from offmated.jobs.table import JobRow
from offmated.paths import Paths
from planner.errors import Exit, UserError, first_line
from planner.job.output_dir import delivered
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.run.processes import Process

_SAVED = ("metrics.jsonl", "checkpoints", "trained", "output")
"""What a run folder has only after its job had begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """The result of adopting run folders. `rows`: the jobs made of them; `left`: for each of the other folders, why no
    job was made of it."""

    rows: list[JobRow]
    left: list[UserError]


def unknown(store: Store, paths: Paths) -> list[Path]:
    """The run folders that no job in the database has, in the order of their names, including those that cannot be
    read."""
    with store.looking() as session:
        known = set(session.scalars(select(JobRow.run_dir)))
    folders = [folder for folder in paths.runs.iterdir() if str(folder) not in known and _may_be_run(folder)]
    return sorted(folders, key=lambda folder: (not folder.name.isdecimal(), folder.name.zfill(12)))


def follow_runs(store: Store, paths: Paths) -> None:
    """Correct the paths in the rows of jobs (run folders, and models in these) after the whole state folder was
    moved."""
    with store.writing() as session:
        known = set(session.scalars(select(JobRow.run_dir)))
        for row in session.scalars(select(JobRow).where(~JobRow.run_dir.startswith(f"{paths.runs}/", autoescape=True))):
            before, now = Path(row.run_dir), paths.runs / Path(row.run_dir).name
            with suppress(OSError):  # nobody knows whether the folder is there: the row stays as it is
                if before.exists() or str(now) in known or not RunFolder(now).resolved.is_file():
                    continue
                row.run_dir = str(now)
                output = (row.result or {}).get("output")
                if isinstance(output, str) and Path(output).is_relative_to(before):
                    row.result = {**(row.result or {}), "output": str(now / Path(output).relative_to(before))}


def adopt(store: Store, paths: Paths, names: Sequence[str] = ()) -> Adopted:
    """Make jobs of the run folders with these names, or of all `unknown` ones. A job is done if its model is there,
    held if none of its processes had begun, else failed, so that a retry goes on from its checkpoint. Folders stay
    where they are; a job's number is its folder's name, unless another job has it. A folder that cannot be read, or in
    which a process works (`run-lives`), is left out. Raises UserError `not-a-run`, `run-known`; then no job is made."""
    folders = [_named(store, paths, name) for name in dict.fromkeys(names)] if names else unknown(store, paths)
    described, left = [], []
    for folder in folders:
        try:
            _check_left(folder)
            described.append((folder, _described(folder)))
        except UserError as error:
            left.append(error if error.code == "run-lives" else _unreadable(folder, error))
        except (OSError, ValueError, LookupError, TypeError) as error:
            left.append(_unreadable(folder, error))
    with store.writing() as session:
        rows: list[JobRow] = []
        known = set(session.scalars(select(JobRow.run_dir)))  # a submission may have given a folder its row meanwhile
        for folder, values in described:
            if str(folder) in known:
                continue
            number = _number(session, folder, paths)
            if values["error"] is not None:
                values["error"] = UserError.from_json(values["error"]).of_job(number).to_json()
            row = JobRow(id=number, run_dir=str(folder), **_place(session), **values)
            session.add(row)
            session.flush()
            rows.append(row)
        if rows and session.get_bind().dialect.name == "postgresql":  # it gives numbers by a counter of its own
            session.execute(text("SELECT setval(pg_get_serial_sequence('jobs', 'id'), (SELECT max(id) FROM jobs))"))
    return Adopted(rows=rows, left=left)


def _is_run(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.is_symlink()
    return not hidden and RunFolder(folder).resolved.is_file()


def _may_be_run(folder: Path) -> bool:
    try:
        return _is_run(folder)
    except OSError:  # it cannot be looked into: `adopt` says so
        return True


def _unreadable(folder: Path, error: Exception) -> UserError:
    why = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    return UserError(
        f"The run folder {folder} cannot be read, so no job was made of it.",
        code="run-unreadable",
        numbers=(why,),
        hint=f"repair it, then offmate adopt {folder.name}",
    )


def _named(store: Store, paths: Paths, name: str) -> Path:
    folder = paths.runs / Path(os.path.normpath(name)).name
    is_run = False
    with suppress(OSError, ValueError):  # the name is too long, or has a null byte
        inside = Path(os.path.realpath(paths.runs / name)) == Path(os.path.realpath(folder))
        is_run = inside and folder.is_dir() and _may_be_run(folder)
    if not is_run:
        raise UserError(
            f"{name} is not the run folder of a job.",
            code="not-a-run",
            exit_code=Exit.USAGE,
            numbers=(f"run folders are in {paths.runs}",),
            hint="offmate adopt takes all that no job has",
        )
    with store.looking() as session:
        known = session.scalar(select(JobRow.id).where(JobRow.run_dir == str(folder)))
    if known is not None:
        raise UserError(
            f"{folder} is the run folder of job {known}.",
            code="run-known",
            exit_code=Exit.USAGE,
            hint=f"offmate show {known}",
        )
    return folder


def _check_left(folder: Path) -> None:
    """Raise UserError where a process of a daemon with another database still works in the folder."""
    with suppress(OSError, ValueError):
        if (process := Process.parse(RunFolder(folder).process.read_text())).alive():
            raise UserError(
                f"A process still works in {folder}.",
                code="run-lives",
                exit_code=Exit.USAGE,
                numbers=(f"process {process.pid}",),
                hint="end its daemon, or wait until it is done",
            )


def _described(folder: Path) -> dict[str, Any]:
    """The columns of a job's row as far as its run folder tells them. Raises UserError where the job cannot be read."""
    run = RunFolder(folder)
    job = Job.from_resolved(run.resolved)
    end = run.last_event("end", 0)
    ends_done = end is not None and end.get("status") == "done"
    model = delivered(job.output_dir, run.output, run.token())
    done, step = model is not None or ends_done, run.last_checkpoint_step()
    created_at = run.resolved.stat().st_mtime
    files = [path.stat().st_mtime for path in (run.log, run.metrics) if path.exists()]
    starts = [event for event in run.read_metrics() if event["event"] == "start"]
    begun = any((folder / name).exists() for name in _SAVED)
    waits = not begun and run.read_error() is None
    lost = UserError(
        "The job had not ended when the database was lost.",
        code="job-adopted",
        numbers=(f"its last checkpoint is of step {step}" if step is not None else "it has no checkpoint",),
        hint="offmate retry ID goes on with it",
    )
    window = window_of(job.schedule) if job.schedule is not None else None
    return {
        "window": str(window) if window else None,
        "begin_at": window.opening(time.time()) if window else None,
        "name": run.read_name() or name_of(job, "", Path.home()),
        "hold": Hold.HELD if waits else None,
        "state": JobState.DONE if done else JobState.SUBMITTED if waits else JobState.FAILED,
        "created_at": created_at,
        "started_at": starts[0].get("time") if starts else None,
        "ended_at": None if waits else max([created_at, *files]),
        "attempts": len(starts),
        "history": [],
        "crashes": 0,
        "last_checkpoint_step": step,
        "error": None if done or waits else (run.read_error() if not begun else None) or lost.to_json(),
        "exit_code": None if waits else 0 if done else int(Exit.FAILED),
        "result": end if ends_done else ({"output": str(model)} if done else None),
        "priority": 0,
        "notes": [f"taken back from {folder} on {time.strftime('%Y-%m-%d')}"],
        "output_dir": os.path.realpath(job.output_dir) if job.output_dir is not None else None,
    }


def _number(session: Session, folder: Path, paths: Paths) -> int:
    """The folder's name as a number, unless it is none or a job has it; else one that no job and no folder has."""
    if folder.name.isdecimal() and session.get(JobRow, int(folder.name)) is None:
        return int(folder.name)
    names = [int(other.name) for other in paths.runs.iterdir() if other.name.isdecimal()]
    return 1 + max([*names, session.scalar(select(func.max(JobRow.id))) or 0])


def _place(session: Session) -> dict[str, int]:
    return {"position": 1 + (session.scalar(select(func.max(JobRow.position))) or 0)}

"""Runs the task of the planner's worker: a process of its own plans a job. Before, another process counts the tokens of
the job's data, if these are on this machine, or if a plan for rows of `max_length` does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from offmated.jobs.hub import waiting_line, waits_for_hub
from offmated.jobs.states import JobState, StopReason
from offmated.jobs.store import Store
from planner.errors import Exit
from planner.job.at_hand import why_not_at_hand
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.run.watch import Watch

PLAN_LIMIT_S = 2 * 3600.0
"""Seconds after which a planner that hangs is ended. The largest models take minutes to plan, and as long again to be
measured."""


def plan_job(job_id: int) -> None:
    """Plan a submitted job. Does nothing if the job is not due for planning: the queue may send a message twice, or
    late."""
    store = Store.from_environment()
    with Watch(lambda: cancelled(store, job_id)) as watch:
        row = store.take(job_id, JobState.PLANNING, Process.current())
        if row is None:
            return
        with store.handling(row):
            run = RunFolder(Path(row.run_dir))
            run.error.unlink(missing_ok=True)
            if not waits_for_hub(row.error):  # otherwise the log says that already
                run.say("planning")
            process, code = "data", int(Exit.DONE)
            if run.read_counted() is None and why_not_at_hand(Job.from_resolved(run.resolved)) is None:
                code = count_data(run, watch, limit_s=PLAN_LIMIT_S)
            if code == Exit.DONE:
                process, code = "planner", run_planner(run, store.url, watch)
            if code == Exit.DOES_NOT_FIT and run.read_counted() is None:
                run.error.unlink(missing_ok=True)
                run.say("rows of max_length do not fit; the data may have shorter ones")
                process, code = "data", count_data(run, watch, limit_s=PLAN_LIMIT_S)
                if code == Exit.DONE:
                    process, code = "planner", run_planner(run, store.url, watch)
            store.end(row, code, process=process)
            say_what_is_waited_for(store, job_id, run)


def say_what_is_waited_for(store: Store, job_id: int, run: RunFolder) -> None:
    """If a job waits for the Hugging Face hub, write that to its log, one line for each try."""
    if (line := waiting_line(store.job(job_id))) is not None:
        run.say(line)


def cancelled(store: Store, job_id: int) -> bool:
    """Whether the user has cancelled the job. False while the database does not answer, since it is not known then; a
    job that is being cancelled gets the signal repeatedly."""
    try:
        return store.job(job_id).stop_reason is StopReason.CANCEL
    except SQLAlchemyError:
        return False


def count_data(run: RunFolder, watch: Watch, *, limit_s: float = float("inf")) -> int:
    """Run the process that reads a job's data and counts their tokens; returns its exit code as `Watch.run` does."""
    run.say("reading the data and counting their tokens")
    return watch.run([sys.executable, "-P", "-m", "worker.prepare", str(run.path)], run, limit_s=limit_s)


def run_planner(run: RunFolder, database_url: str, watch: Watch, *, measure: bool = False) -> int:
    """Run the planner process on a run folder; returns its exit code as `Watch.run` does. Its stdout, a plan in JSON,
    is dropped, because plan.json has it too. Its messages for people, on stderr, go to the job's log."""
    options = ["--measure"] if measure else []
    command = [sys.executable, "-P", "-m", "planner", "plan", str(run.path), "--database", database_url, *options]
    return watch.run(command, run, keep_output=False, limit_s=PLAN_LIMIT_S)

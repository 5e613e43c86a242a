"""Defines the task that the GPU worker runs: it trains a job in a fresh process. The worker's own process never imports
torch."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from offmated.jobs.awake import awake
from offmated.jobs.figures import plan_of, why_replaced
from offmated.jobs.hub import waits_for_hub
from offmated.jobs.nvml import energy_joules, energy_since
from offmated.jobs.smaller import take_a_notch
from offmated.jobs.states import Ending, JobState, account
from offmated.jobs.store import Store
from offmated.jobs.table import JobRow
from planner.cache.store import Cache
from planner.errors import Exit, UserError
from planner.job.frozen import changed_packages
from planner.job.output_dir import Place
from planner.job.schema import Job
from planner.run.folder import RunFolder
from planner.run.processes import Process
from planner.run.step_times import step_times
from planner.run.watch import Watch
from planner.tasks import cancelled, count_data, run_planner, say_what_is_waited_for
from planner.units import format_seconds
from worker.training.metrics import read_metrics

_OFF = 1.5


def run_job(job_id: int) -> None:
    """Train the waiting job number `job_id`, from its last checkpoint if there is one. Does nothing when the job is not
    due."""
    store = Store.from_environment()
    with Watch(lambda: cancelled(store, job_id)) as watch:
        row = store.take(job_id, JobState.RUNNING, Process.current())
        if row is None:
            return
        with store.handling(row):
            run = RunFolder(Path(row.run_dir))
            run.error.unlink(missing_ok=True)
            before = energy_joules()
            with awake(f"job {job_id} trains"):
                process, code = _train(row, run, store.url, watch)
            energy_j = energy_since(before)
            clear_place(run)
            ending = Ending(process=process, exit_code=code, error=run.read_error())
            if not waits_for_hub(ending.error):
                run.say(account(store.job(job_id).stop_reason, ending))
            less = process == "trainer" and take_a_notch(run, ending.error)
            store.end(row, code, process=process, less=less, energy_j=energy_j)
            say_what_is_waited_for(store, job_id, run)
            if process == "trainer" and code == Exit.DONE:  # last, because the job is done even if this fails
                forget_if_wrong(run, store.url)


def clear_place(run: RunFolder) -> None:
    """Remove unfinished files that the trainer of `run` has left where the model folder goes. The trainer's process has
    ended, perhaps by a kill."""
    with suppress(OSError, UserError):  # what is left is removed at the next start
        job = Job.from_resolved(run.resolved)
        Place(folder=Path(job.output_dir or run.output), token=run.token()).clear()


def forget_if_wrong(run: RunFolder, database_url: str) -> bool:
    """Drop the measurement behind a finished run's plan, and the plans that rest on it, if the steps took a time far
    from the predicted one: then the machine was busy during the measurement. Returns whether it was dropped."""
    plan = run.read_plan()
    times = step_times(read_metrics(run.metrics))
    step_s, predicted_s = times.step_s, times.predicted_step_s
    if plan is None or step_s is None or predicted_s is None or not times.steady or plan.get("measurement") is None:
        return False
    if 1 / _OFF <= step_s / predicted_s <= _OFF:
        return False
    run.say(
        f"a step took {format_seconds(step_s)}, predicted were {format_seconds(predicted_s)}: what was measured for "
        "this plan is dropped; the next job like this one is measured again",
    )
    Cache(database_url).forget_measurement(plan["measurement"])
    return True


def _train(row: JobRow, run: RunFolder, database_url: str, watch: Watch) -> tuple[str, int]:
    """Count the data, measure and plan, if the plan is not final, then train. Returns which process ended last, and its
    exit code."""
    if not _is_final(run):
        if run.read_counted() is None and (code := count_data(run, watch)) != Exit.DONE:
            return "data", code
        run.say("planning with measurements of the blocks")
        estimate = plan_of(run)
        code = run_planner(run, database_url, watch, measure=True)
        if code != Exit.DONE:
            return "planner", code
        measured = plan_of(run)
        if estimate and measured and (why := why_replaced(estimate, measured)):
            run.say(why)
    step = run.last_checkpoint_step()
    for change in changed_packages(run.read_packages()):
        run.say(f"not what the job was submitted with: {change}; numbers may differ in their last bits")
    run.say(f"training, attempt {row.attempts}, " + ("from the start" if step is None else f"from step {step}"))
    return "trainer", watch.run([sys.executable, "-P", "-m", "worker.trainer", str(run.path)], run)


def _is_final(run: RunFolder) -> bool:
    """Whether the run's plan is final: made from measurements, and for rows that were counted. A plan that was made
    before they were counted stays if steps were done under it."""
    plan = run.read_plan()
    counted = run.read_counted() is not None or run.last_checkpoint_step() is not None
    return plan is not None and bool(plan["measured"]) and counted

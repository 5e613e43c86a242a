"""Tries a job again that has failed or was cancelled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offmated.jobs.states import AGAIN, JobState
from offmated.jobs.store import Store
from offmated.jobs.submission import as_asked, check_output, look_again
from offmated.jobs.table import JobRow
from planner.errors import UserError
from planner.job.base import AT_ONCE_BYTES, BESIDE_WEIGHTS, PARTS, check_base, freeze_base
from planner.job.frozen import check_frozen, freeze, other_content
from planner.job.schema import Job
from planner.machine.this_machine import check_budgets_here
from planner.run.folder import RunFolder

_SHOWN = 20
_BUSY: set[int] = set()
_FREED = threading.Condition()


def retry(
    store: Store,
    job_id: int,
    *,
    gpu_budget: int | None = None,
    cpu_budget: int | None = None,
    allow_changed_data: bool = False,
    allow_changed_model: bool = False,
) -> JobRow:
    """Make a failed or cancelled job wait again, to go on from its last checkpoint if it has one. Budgets are in bytes;
    None keeps the job's. With a checkpoint the job goes on under the plan it has, as long as no budget changes; else it
    is planned anew. `allow_changed_data`: data that were not read yet may have changed since the submission, and are
    read as they are now; `allow_changed_model`: the files of the model and the tokenizer may have changed.

    Raises UserError when the job neither failed nor was cancelled, or can no longer be run as it was written."""
    budgets = {name: size for name, size in (("gpu_budget", gpu_budget), ("cpu_budget", cpu_budget)) if size}
    with alone(job_id):
        row = store.job(job_id)
        again = row.state in AGAIN
        run = RunFolder(Path(row.run_dir))
        allowed = (allow_changed_data, allow_changed_model)
        try:
            return store.retry(job_id, _make_ready(store, run, budgets, *allowed) if again else row.state)
        except UserError as error:
            raise error.of_job(job_id) from None


@contextmanager
def alone(job_id: int) -> Iterator[None]:
    """A context during which no other thread retries or cleans the job `job_id`, since both first look at its folder
    and then change it. Other jobs do not wait, as reading a job's files takes up to minutes."""
    with _FREED:
        _FREED.wait_for(lambda: job_id not in _BUSY)
        _BUSY.add(job_id)
    try:
        yield
    finally:
        with _FREED:
            _BUSY.remove(job_id)
            _FREED.notify_all()


def _make_ready(store: Store, run: RunFolder, budgets: dict[str, int], other_data: bool, other_model: bool) -> JobState:
    """Check the job of a run folder once more, and write what another try changes. Returns the state in which the job
    waits: WAITING for the GPU, or SUBMITTED for the planner. `other_data`, `other_model`: whether these may have
    changed."""
    before = job = Job.from_resolved(run.resolved)
    check_output(job, store, run)
    goes_on = run.last_checkpoint_step() is not None
    reads_again = other_model and not goes_on  # with a checkpoint its tokens stay, even if the tokenizer has changed
    frozen = freeze(job) if other_data else None
    if frozen is None and (not run.is_tokenized or reads_again):
        check_frozen(job, run.read_frozen())
    base = (
        freeze_base(job, run.path.parent)
        if other_model
        else check_base(
            job,
            run.read_base(),
            run.path.parent,
            parts=BESIDE_WEIGHTS if run.has_trained() else PARTS,
            most_bytes=AT_ONCE_BYTES,
        )
    )
    if not goes_on:
        look_again(run, job)
        job = as_asked(run, job)
    if budgets:
        check_budgets_here(budgets.get("gpu_budget"), budgets.get("cpu_budget"))
        job = job.model_copy(update=budgets)
    # Nothing is written before all is checked: a try that is refused leaves the job as it was.
    if frozen is not None:
        _say_allowed(run, "data", run.read_frozen(), frozen)
        run.write_frozen(frozen)
        if not run.is_tokenized or (run.read_error() or {}).get("code") == "rows-longer-than-planned":
            run.tokens.unlink(missing_ok=True)
            run.plan.unlink(missing_ok=True)
    if reads_again:
        run.forget_tokens()
    if other_model and base is not None:
        _say_allowed(run, "model", run.read_base(), base)
    run.write_base(base)
    run.forget_notches()  # the person may have made room: budgets may be lowered as often as before
    if job != before:
        run.plan.unlink(missing_ok=True)  # or a later retry without budgets would go on under it
        run.write_resolved(job.resolved_yaml())
    plan = run.read_plan()
    return JobState.WAITING if goes_on and plan is not None and plan["measured"] else JobState.SUBMITTED


def _say_allowed(
    run: RunFolder, kind: str, before: Mapping[str, Mapping[str, Any]] | None, now: Mapping[str, Mapping[str, Any]]
) -> None:
    """Have the job's log say which files have changed, as the person who has it tried again allowed."""
    lines = other_content(before, now)
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    run.say(f"--allow-changed-{kind}: " + ("; ".join([*lines[:_SHOWN], *more]) or "no file has changed"))

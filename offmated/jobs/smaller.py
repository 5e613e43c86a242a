"""Lowers the memory budget of a job that ran out of memory although its plan should fit, before it is planned again."""

from __future__ import annotations

from typing import Any

from planner.job.schema import Job
from planner.out_of_memory import HOST_MEMORY_NOT_REGISTERED
from planner.run.folder import RunFolder
from planner.run.oom import KILLED_FOR_MEMORY
from planner.units import format_bytes_down

MOST_NOTCHES = 3
_NOTCH = 0.92
_BUDGETS = {
    "out-of-memory": "gpu_budget",
    KILLED_FOR_MEMORY: "cpu_budget",
    HOST_MEMORY_NOT_REGISTERED: "cpu_budget",
}


def take_a_notch(run: RunFolder, error: dict[str, Any] | None) -> bool:
    """Lower the job's budget for the memory (GPU or host) that ran out according to the trainer's `error`, so that the
    job is planned again with the same batch. A line of its log says so. Returns True then. Returns False and changes
    nothing where `error` is not about memory, where the run has no plan, where the new budget would be 0, or where it
    has been lowered `MOST_NOTCHES` times."""
    error = error or {}
    budget, document = _BUDGETS.get(error.get("code", "")), run.read_plan()
    if budget is None or document is None:
        return False
    notches = run.read_notches()
    if len(notches) >= MOST_NOTCHES:
        return False
    before = int(document["plan"][f"{budget}_bytes"])
    after = min(int(_NOTCH * before), error.get("had_bytes", before))
    if after == 0:
        return False
    run.write_notches([*notches, {"budget": budget, "before_bytes": before, "after_bytes": after}])
    job = Job.from_resolved(run.resolved).model_copy(update={budget: after})
    run.plan.unlink(missing_ok=True)  # first, as the job would run out of memory again with this plan
    run.write_resolved(job.resolved_yaml())
    step = run.last_checkpoint_step()
    origin = "from the start" if step is None else f"to go on from step {step}"
    run.say(
        f"out of memory: planned again with {budget} {format_bytes_down(after)}, before {format_bytes_down(before)}, "
        f"{origin}; try {len(notches) + 1} of {MOST_NOTCHES}"
    )
    return True

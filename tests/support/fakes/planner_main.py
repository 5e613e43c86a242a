"""Stands where planner/__main__.py does, for tests of the daemon: keeps to the same contract, without a model.

The job's `run_name` says what happens: "too-big" does not fit, "slow-plan" takes until it is stopped, or
there is a file `go` in the run folder, "offline" does not reach the hub before there is one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import yaml

from planner.errors import UserError
from planner.hub import not_reached
from planner.run.ending import exit_code_of
from planner.run.folder import RunFolder
from planner.schedule.plan import stage_order


def throw(error: UserError) -> int:
    raise error


folder = Path(sys.argv[2])
job = yaml.safe_load((folder / "resolved.yaml").read_text())
print("planner here", sys.argv[3:], file=sys.stderr, flush=True)
if job["run_name"] == "too-big":
    error = {
        "what": "No schedule fits this memory budget.",
        "numbers": ["budget 1.0 GiB, least possible 7.4 GiB"],
        "hint": "gpu_budget: 8GiB",
        "code": "budget-too-small",
        "exit_code": 3,
    }
    (folder / "error.json").write_text(json.dumps(error))
    sys.exit(3)
until = time.monotonic() + 120
while job["run_name"] == "slow-plan" and not (folder / "go").exists() and time.monotonic() < until:
    time.sleep(0.02)
if job["run_name"] == "offline" and not (folder / "go").exists():
    told = not_reached("the config of owner/model", TimeoutError("no answer"))
    sys.exit(exit_code_of(lambda: throw(told), RunFolder(folder)))
plan = {
    "stages": [{"direction": direction, "block": block} for direction, block in stage_order(3)],
    "options": ["keep", "recompute", "keep"],
    "resident": [],
    "slices": 1,
    "rounds": 1,
    "clip": False,
    "step_s": 0.1,
    "lp_step_s": 0.09,
    "bound_s": 0.08,
    "solver_gap": 0.01,
    "gpu_peak_bytes": 900,
    "cpu_peak_bytes": 2000,
    "gpu_budget_bytes": job["gpu_budget"] or 1000,
    "cpu_budget_bytes": 4000,
    "source": "oilp",
}
measured = "--measure" in sys.argv
document = {
    "format": 1,
    "plan": plan,
    "chain": {},
    "hardware": {},
    "measured": measured,
    "cached": False,
    "solve_s": 0.5,
    "key": "k",
}
(folder / "plan.json").write_text(json.dumps(document))
print(json.dumps(document))

"""Defines the content of plan.json: a plan, what it is for, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from planner.codec import Json, to_json
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.disk_use import DiskUse
from planner.schedule.plan import Plan
from planner.whatif.batch_size import BatchSplit

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan and where it comes from: the content of plan.json.

    `rows`: rows of a slice. `lengths`: the most tokens of a row, of what is read and of the labels. `measured`: the
    plan is final. `solve_s`: seconds spent on it this time. `measurement`: the key of the measurement that it rests on;
    None for an estimate. `splits`: the splits of a step that the planner compared, the best estimate first; empty where
    the job gives the split. `disk`: what the plan does to the drives over the job's steps. `kernels`: the kernels that
    PyTorch used when the plan was made, see `planner.measure.repeatable.kernels_in_force`."""

    rows: int
    lengths: tuple[int, int]
    plan: Plan
    chain: Chain
    hardware: Hardware
    measured: bool
    cached: bool
    solve_s: float
    key: str
    measurement: str | None
    splits: tuple[BatchSplit, ...] = ()
    disk: DiskUse | None = None
    kernels: str = ""

    def to_json(self, *, with_chain: bool = True) -> dict[str, Json]:
        """The JSON object of plan.json; without its chain where not `with_chain`."""
        parts: dict[str, Json] = {
            "format": FORMAT,
            "plan": to_json(self.plan),
            "rows": self.rows,
            "length": self.lengths[0],
            "label_length": self.lengths[1],
        }
        if with_chain:
            parts["chain"] = to_json(self.chain)
        return parts | {
            "hardware": to_json(self.hardware),
            "measured": self.measured,
            "cached": self.cached,
            "solve_s": self.solve_s,
            "key": self.key,
            "measurement": self.measurement,
            "splits": to_json(self.splits),
            "disk": to_json(self.disk),
            "kernels": self.kernels,
        }

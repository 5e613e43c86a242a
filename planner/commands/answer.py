"""What becomes plan.json: a plan, what it is of, and where it comes from."""

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
    """A plan and where it comes from: plan.json. `measured`: the plan is final. `solve_s`: spent on it this time.
    `measurement`: the key of the measurement it rests on; None for an estimate. `rows`: of a slice; `lengths`: the
    tokens of each at most, of what is read and of the labels. `splits`: where the planner decided them, what it
    compared, the best estimate first. `disk`: what it does to the drives, of so many steps as the job says. `kernels`:
    which PyTorch would have taken as it was made, see `planner.measure.repeatable.kernels_in_force`."""

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
        """The object of plan.json."""
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

"""Defines the content of plan.json: a plan, what it was made for, and what it rests on."""

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
    """The content of plan.json: a plan, the chain (the model's blocks) and the machine it was made for, and what it
    rests on.

    `rows`: rows of a slice (micro-batch). `lengths`: the largest number of tokens of a row, for the inputs and for the
    labels. `measured`: the times were measured, so the plan is final. `cached`: the plan was kept from an earlier
    question. `solve_s`: seconds spent on the plan this time. `key`: its key among the kept plans. `measurement`: the
    key of the measurement that it uses; None if times were estimated. `splits`: the splits of a step into micro-batches
    that the planner compared, the fastest by estimate first; empty if the job gives the split. `disk`: what the plan
    does to the drives over the job's steps. `kernels`: the PyTorch kernels in force when the plan was made
    (`planner.measure.repeatable.kernels_in_force`). `unit`: what a row of the data is, in a word: with "pair" or
    "answer" each of the `rows` is two rows of tokens. `reference`: what people are told of the pass before the first
    step that scores all answers; "" where there is none.
    """

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
    unit: str = "row"
    reference: str = ""

    def to_json(self, *, with_chain: bool = True) -> dict[str, Json]:
        """The JSON object of plan.json; without `with_chain`, the chain is left out."""
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
            **({} if self.unit == "row" else {"unit": self.unit}),
            **({"reference": self.reference} if self.reference else {}),
        }

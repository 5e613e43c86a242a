"""Predicts a step's time under the plan from the row lengths of its slices (micro-batches); the time in the plan itself
is for slices of full length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.plan import Plan
from planner.schedule.simulate import host_traffic_bytes, simulate
from worker.data.padding import width


class StepForecast:
    """Predicts the times of steps. `hardware`: the rates (computing, links, disks) that the plan rests on. `most`: the
    padded length in tokens of the rows of a slice of full length, see `worker.data.padding.width`."""

    def __init__(self, plan: Plan, chain: Chain, hardware: Hardware, most: int) -> None:
        self._plan, self._chain, self._hardware, self._most = plan, chain, hardware, most
        self._program = compile_program(plan, chain)
        self._known = {(most,) * (plan.rounds * plan.slices): plan.step_s}

    def step_s(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """The seconds that a step on `batches` should take. Steps whose batches have the same lengths are simulated
        once."""
        lengths = tuple(width(batch) for batch in batches)
        if lengths not in self._known:
            shares = [length / self._most for length in lengths]
            played = simulate(self._program, self._chain, self._hardware, shares)
            traffic = host_traffic_bytes(self._program, self._chain, shares)
            self._known[lengths] = max(played.step_s, traffic / self._hardware.cpu_memory_bytes_per_s)
        return self._known[lengths]

"""How long a step should take under the plan, by the lengths of its slices: the plan itself is for full ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import compile_program
from planner.schedule.plan import Plan
from planner.schedule.simulate import host_traffic_bytes, simulate


class Forecast:
    """`hardware` has the rates that the plan rests on, `max_length` is the length of a full slice's rows."""

    def __init__(self, plan: Plan, chain: Chain, hardware: Hardware, max_length: int) -> None:
        self._plan, self._chain, self._hardware, self._max_length = plan, chain, hardware, max_length
        self._program = compile_program(plan, chain)
        self._known = {(max_length,) * (plan.rounds * plan.slices): plan.step_s}

    def step_s(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """Seconds of a step on `batches`, whose `input_ids` are [rows, length]. Steps of the same lengths are simulated
        once."""
        lengths = tuple(batch["input_ids"].shape[1] for batch in batches)
        if lengths not in self._known:
            shares = [length / self._max_length for length in lengths]
            played = simulate(self._program, self._chain, self._hardware, shares)
            traffic = host_traffic_bytes(self._program, self._chain, shares)
            self._known[lengths] = max(played.step_s, traffic / self._hardware.cpu_memory_bytes_per_s)
        return self._known[lengths]

"""Chooses which of a candidate's optimizer states on disk trail their weight, that is, are updated one step after it.

With clipping an update waits for the norm of all gradients, and the drive idles during the backward pass. States that
trail are read when the norm is known, to update the weight alone. During the next step they are read again, updated and
written. The price is a second read, and host memory of its own for the gradient until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate.candidate import Candidate, Side, TensorSchedule
from planner.schedule.chain import Chain, Tensor

_PARTS = 6


def trailing_bytes(tensor: Tensor, rounds: int) -> int:
    """Additional bytes on the host if a tensor's states are updated one step after its weight. The gradient, still
    needed for the states, then cannot overwrite the working copy."""
    return tensor.gradient_bytes - tensor.host_gradient_bytes(rounds)


def ways_to_trail(chain: Chain, candidate: Candidate, *, rounds: int, host_bytes: int) -> Iterator[Candidate]:
    """The candidate with the states of more or fewer tensors updated one step after their weight: first none, then
    growing parts of those for which `host_bytes` more host memory are enough.

    Tensors whose next gradients come last are chosen first. Yields nothing if no states can be updated so.
    """
    users, last = chain.users(), len(chain.blocks) - 1
    host_bytes += sum(trailing_bytes(j.tensor, rounds) for j in candidate.schedules if j.trails)
    chosen: list[str] = []
    for schedule in sorted(filter(_may_trail, candidate.schedules), key=lambda j: users[j.tensor.name][0]):
        tensor, size = schedule.tensor, trailing_bytes(schedule.tensor, rounds)
        if users[tensor.name][-1] < last and size <= host_bytes:
            host_bytes -= size
            chosen.append(tensor.name)
    for count in sorted({-(-len(chosen) * part // _PARTS) for part in range(_PARTS + 1)}) if chosen else ():
        names = frozenset(chosen[:count])
        yield replace(
            candidate, schedules=tuple(replace(j, trails=j.tensor.name in names) for j in candidate.schedules)
        )


def _may_trail(schedule: TensorSchedule) -> bool:
    return schedule.side is Side.CPU and schedule.tensor.states_on_disk and schedule.tensor.can_trail

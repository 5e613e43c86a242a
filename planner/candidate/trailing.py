"""Which of a candidate's states on disk trail their weight.

With clipping an update waits for the norm of all gradients, and the drive idles during the backward pass. States that
trail are read when the norm is known, to update the weight alone. During the next step they are read again, updated and
written. The price is a second read, and memory of its own for the gradient until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate.candidate import Candidate, Side, TensorSchedule
from planner.schedule.chain import Chain, Tensor

_PARTS = 6


def trailing_bytes(tensor: Tensor, rounds: int) -> int:
    """Bytes more on the host for a tensor whose states trail: a gradient beside the working copy, which is made anew
    while the states still need the gradient."""
    return tensor.gradient_bytes - tensor.host_gradient_bytes(rounds)


def ways_to_trail(chain: Chain, candidate: Candidate, *, rounds: int, host_bytes: int) -> Iterator[Candidate]:
    """The candidate with states of more or fewer tensors trailing: none, and growing parts of those for which
    `host_bytes` more on the host are enough. Tensors whose next gradients come last are the first to trail. Yields
    nothing where no states can trail."""
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

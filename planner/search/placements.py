"""Placements of the tensors that may leave, and the schedules that take the least memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate.candidate import Absence, Side, TensorSchedule
from planner.candidate.setting import Setting
from planner.schedule.chain import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What happens to one tensor that may leave, whenever it happens.

    `after_backward`: away between its backward and its next forward. `after_forward`: away between its forward and its
    backward; `send` says when the host gets the copy that this needs: "" the host's copy is current by then, "D" it is
    sent before the forward ends, "K" after. `trails`: its states on disk are updated in the next step.
    """

    tensor: Tensor
    block: int
    side: Side
    after_backward: bool = False
    after_forward: bool = False
    send: str = ""
    states_travel: bool = False
    trails: bool = False


def in_their_stages(setting: Setting, placements: Sequence[Placement]) -> list[TensorSchedule]:
    """A schedule for every placement, in one round. What leaves is sent and released in the stage that uses it last,
    and what comes is fetched in the stage that reads it. No other times take less memory;
    `planner.search.list_schedule` finds faster ones.
    """
    last = 2 * len(setting.chain.blocks) - 2
    schedules = []
    for placement in placements:
        forward, backward = placement.block, last - placement.block
        absences = []
        if placement.after_backward:
            offload = backward if placement.side is Side.GPU else None
            absences.append(Absence(evict=backward, prefetch=forward, offload=offload))
        if placement.after_forward:
            absences.append(Absence(evict=forward, prefetch=backward, offload=forward if placement.send else None))
        schedule = TensorSchedule(tensor=placement.tensor, side=placement.side, weight=tuple(absences))
        if placement.side is Side.CPU:
            # After the stale weight's release; block 0 has both in the last stage, the release first.
            update = last if setting.clip else min(backward + 1, last)
            schedule = replace(schedule, update=update, send=backward, drop=backward, trails=placement.trails)
        elif placement.side is Side.GPU:
            update = last if setting.clip else backward
            away = (Absence(evict=update, prefetch=update, offload=update),) if placement.states_travel else ()
            schedule = replace(schedule, update=update, states=away)
        schedules.append(schedule)
    return schedules

"""Says for each tensor when it is away from the device (its placement), and makes the schedules that need the least
memory for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.candidate.candidate import Absence, Side, TensorSchedule
from planner.candidate.setting import Setting
from planner.schedule.chain import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one tensor is during a step, and who updates it (`side`), without the exact stages of its transfers.

    `after_backward`: it is away from the device between its backward and its next forward. `after_forward`: away
    between its forward and its backward. `send`: when the host gets the copy that `after_forward` needs: "" the host's
    copy is up to date by then, "D" it is sent before the forward ends, "K" after. `states_travel`: its optimizer states
    come to the device only for the update. `trails`: its optimizer states on disk are updated one step later.
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
    """Return a schedule for each tensor's placement, in one round: the stages of its transfers and its update. A stage
    is one block's forward or backward. A tensor that leaves the device is sent and released in the stage that uses it
    last, and one that comes back is fetched in the stage that reads it. No other times need less memory;
    `planner.search.list_schedule` finds faster ones."""
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

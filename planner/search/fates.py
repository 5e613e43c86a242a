"""What happens to each tensor that may leave, and the plainest times for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.draft.draft import Journey, Side, Trip
from planner.draft.setting import Setting
from planner.schedule.chain import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What happens to one tensor that may leave, whenever it happens.

    `after_backward`: away between its backward and its forward. `after_forward` likewise; `send` says when the host
    gets the copy that this needs: "" it is right by then, "D" before the forward ends, "K" after.
    """

    tensor: Tensor
    block: int
    side: Side
    after_backward: bool = False
    after_forward: bool = False
    send: str = ""
    states_travel: bool = False


def in_their_stages(setting: Setting, fates: Sequence[Fate]) -> list[Journey]:
    """A journey for every fate: what leaves is sent and released in the stage that touched it last, what comes is
    fetched in the one that reads it, in one round. No other times take less memory; `planner.search.list_schedule`
    finds faster ones.
    """
    last = 2 * len(setting.chain.blocks) - 2
    journeys = []
    for fate in fates:
        forward, backward = fate.block, last - fate.block
        trips = []
        if fate.after_backward:
            offload = backward if fate.side is Side.GPU else None
            trips.append(Trip(evict=backward, prefetch=forward, offload=offload))
        if fate.after_forward:
            trips.append(Trip(evict=forward, prefetch=backward, offload=forward if fate.send else None))
        journey = Journey(tensor=fate.tensor, side=fate.side, weight=tuple(trips))
        if fate.side is Side.CPU:
            # Once its stale weight is gone; block 0's goes before its update in the last stage.
            update = last if setting.clip else min(backward + 1, last)
            journey = replace(journey, update=update, send=backward, drop=backward)
        elif fate.side is Side.GPU:
            update = last if setting.clip else backward
            away = (Trip(evict=update, prefetch=update, offload=update),) if fate.states_travel else ()
            journey = replace(journey, update=update, states=away)
        journeys.append(journey)
    return journeys

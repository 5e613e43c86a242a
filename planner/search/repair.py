"""A draft made to fit: where a stage has too much on the device, what waits there unused comes later or leaves earlier.

Whole tensors do not fit where the solver's fractions did. Of what lies on the device without being read, that is moved
first whose use is farthest; a tensor then comes in the very stage that reads it, or leaves in the one that makes it,
which costs time and never memory. What the stages read themselves stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.draft.draft import Draft, Journey, Side, Trip, backward_stage
from planner.schedule.chain import Chain


class _Stages:
    """Who reads a tensor when, and what room there is."""

    def __init__(self, chain: Chain, room_bytes: Sequence[int]) -> None:
        self.room = list(room_bytes)
        self.count = len(self.room)
        self.uses = {
            name: [*blocks, *(backward_stage(chain, block) for block in blocks)]
            for name, blocks in chain.users().items()
        }

    def until(self, stage: int, uses: Sequence[int]) -> int:
        """Stages from `stage` to the next of `uses`."""
        return min((use - stage) % self.count for use in uses)

    def since(self, stage: int, uses: Sequence[int]) -> int:
        """Stages from the last of `uses` to `stage`."""
        return min((stage - use) % self.count for use in uses)

    def give(self, first: int, stages: int, size: int) -> None:
        """`size` bytes less in `stages` stages from `first` on."""
        for n in range(stages):
            self.room[(first + n) % self.count] += size


def tightened(chain: Chain, draft: Draft, room_bytes: Sequence[int]) -> Draft:
    """The draft with less on the device in stages without room, as far as that goes. `room_bytes`: per stage, budget
    less the draft's peak; below zero where it does not fit.
    """
    stages = _Stages(chain, room_bytes)
    journeys = {journey.tensor.name: journey for journey in draft.journeys}
    for stage in range(stages.count):
        if stages.room[stage] >= 0:
            continue
        waiting = [
            (ahead, name, kind)
            for name, journey in journeys.items()
            for ahead, kind in _waiting(stages, journey, stage)
        ]
        for _, name, kind in sorted(waiting, reverse=True):
            if stages.room[stage] >= 0:
                break
            journeys[name] = _moved(stages, journeys[name], kind, stage)
    return replace(draft, journeys=tuple(journeys[journey.tensor.name] for journey in draft.journeys))


def _waiting(stages: _Stages, journey: Journey, stage: int) -> list[tuple[int, str]]:
    """What of this tensor lies unused on the device in `stage`: (stages to its use, "w", "s" or "g")."""
    found: list[tuple[int, str]] = []
    if journey.drop is not None and journey.send is not None and _made(stages, journey) < stage <= journey.drop:
        found.append((stages.count, "g"))
    elif journey.fetch is not None and journey.fetch <= stage < _made(stages, journey):
        found.append((_made(stages, journey) - stage, "g"))
    for kind, trips, uses in _kinds(stages, journey):
        if any(_later(stages, journey, trip, stage, uses) or _sooner(stages, trip, stage, uses) for trip in trips):
            found.append((stages.until(stage, uses), kind))
    return found


def _kinds(stages: _Stages, journey: Journey) -> list[tuple[str, tuple[Trip, ...], list[int]]]:
    """Weights with the stages that read or update them, states with their update."""
    weight_uses, updates = list(stages.uses[journey.tensor.name]), []
    if journey.side is Side.GPU and journey.update is not None:
        updates = [journey.update]
    kinds = [("w", journey.weight, [*weight_uses, *updates])]
    return [*kinds, ("s", journey.states, updates)] if journey.states else kinds


def _made(stages: _Stages, journey: Journey) -> int:
    return max(stages.uses[journey.tensor.name])


def _later(stages: _Stages, journey: Journey, trip: Trip, stage: int, uses: list[int]) -> bool:
    """The trip brings it back by `stage`, to be read after it."""
    return (stage - trip.prefetch) % stages.count < stages.until(trip.prefetch, uses)


def _sooner(stages: _Stages, trip: Trip, stage: int, uses: list[int]) -> bool:
    """It was read before `stage` and leaves at its end or after, before it is read again."""
    since = stages.since(stage, uses)
    return (
        since > 0
        and (trip.evict - stage) % stages.count < stages.until(stage, uses)
        and (stages.since(trip.evict, uses) == since + (trip.evict - stage) % stages.count)
    )


def _moved(stages: _Stages, journey: Journey, kind: str, stage: int) -> Journey:
    tensor = journey.tensor
    if kind == "g":
        assert journey.send is not None and journey.drop is not None
        if journey.fetch is not None and journey.fetch <= stage < _made(stages, journey):
            stages.give(journey.fetch, stage + 1 - journey.fetch, tensor.gradient_bytes)
            return replace(journey, fetch=stage + 1)
        drop = max(_made(stages, journey), stage - 1)
        stages.give(drop + 1, journey.drop - drop, tensor.gradient_bytes)
        return replace(journey, send=min(journey.send, drop), drop=drop)
    size = tensor.bytes if kind == "w" else tensor.state_bytes
    [(_, trips, uses)] = [found for found in _kinds(stages, journey) if found[0] == kind]
    moved = []
    for trip in trips:
        if _later(stages, journey, trip, stage, uses):
            after = (stage - trip.prefetch) % stages.count + 1
            stages.give(trip.prefetch, after, size)
            trip = replace(trip, prefetch=(stage + 1) % stages.count)
        if _sooner(stages, trip, stage, uses):
            before = (stage - 1) % stages.count
            stages.give(stage, (trip.evict - before) % stages.count, size)
            offload = trip.offload
            if offload is not None and stages.since(offload, uses) > stages.since(before, uses):
                offload = before
            trip = replace(trip, evict=before, offload=offload)
        moved.append(trip)
    return replace(journey, weight=tuple(moved)) if kind == "w" else replace(journey, states=tuple(moved))

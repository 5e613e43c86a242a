"""Memory that a draft leaves unused, spent on time: fetches come earlier and releases later, where there is room.

A tensor fetched in the very stage that reads it makes the device wait, and so does one released in the stage that sends
it. Whole tensors and the papers' stages leave room below the budget almost everywhere: each such move takes its bytes
from one stage's room. Correctness never depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.chain import Chain
from planner.itinerary import Draft, Itinerary, Side, Trip, backward_stage


def loosen(chain: Chain, draft: Draft, room_bytes: Sequence[int]) -> Draft:
    """The draft with fetches earlier and releases later. `room_bytes`: per stage, budget less the draft's peak."""
    room = list(room_bytes)
    users = chain.users()
    journeys = []
    for journey in draft.journeys:
        blocks = users[journey.tensor.name]
        uses = {*blocks, *(backward_stage(chain, block) for block in blocks)}
        journeys.append(_later(_earlier(journey, room, uses), room))
    return replace(draft, journeys=tuple(journeys), source=f"{draft.source}, loosened")


def _earlier(journey: Itinerary, room: list[int], uses: set[int]) -> Itinerary:
    """Each of the journey's fetches that a stage of `uses` would wait for one stage earlier, where there is room.

    Others stay: one that came earlier still would only get in the way of what is needed before it.
    """
    stages = len(room)

    def move(trip: Trip, size: int) -> Trip:
        before = (trip.prefetch - 1) % stages
        if trip.prefetch not in uses or room[before] < size:
            return trip
        away = (trip.prefetch - trip.evict) % stages or stages
        least = 1
        if journey.side is Side.CPU and journey.update is not None:
            updated = (journey.update - trip.evict) % stages
            least = updated + 1 if updated < away else 1
        if away - 1 < least:
            return trip
        room[before] -= size
        return replace(trip, prefetch=before)

    tensor = journey.tensor
    return replace(
        journey,
        weight=tuple(move(trip, tensor.bytes) for trip in journey.weight),
        states=tuple(move(trip, tensor.state_bytes) for trip in journey.states),
    )


def _later(journey: Itinerary, room: list[int]) -> Itinerary:
    """Releases that would wait for their own copy, one stage later where that stage has room."""
    stages = len(room)
    tensor = journey.tensor

    def move(trip: Trip, size: int) -> Trip:
        after = (trip.evict + 1) % stages
        away = (trip.prefetch - trip.evict) % stages or stages
        if trip.offload != trip.evict or away < 2 or room[after] < size:
            return trip
        room[after] -= size
        return replace(trip, evict=after)

    drop = journey.drop
    if drop is not None and drop == journey.send and drop + 1 < stages and room[drop + 1] >= tensor.gradient_bytes:
        room[drop + 1] -= tensor.gradient_bytes
        drop += 1
    return replace(
        journey,
        drop=drop,
        weight=tuple(move(trip, tensor.bytes) for trip in journey.weight),
        states=tuple(move(trip, tensor.state_bytes) for trip in journey.states),
    )

"""A draft made faster where the simulator sees it wait: fetches earlier and releases later along the critical path.

The solver's stages are exact about sums and blind to the order within a stage; whole tensors then wait where fractions
would not. The simulator names the waits that the length of a step hangs on. Each of them is moved by one stage where
there is room for its bytes, over and over, until nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.draft.draft import Draft, Journey, Side, Trip
from planner.draft.evaluate import Rating
from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program, Queue
from planner.schedule.plan import stage_order
from planner.schedule.simulate import last_steps

_GAIN = 1e-3  # of a step: less is no reason to go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`op` could not start before `on`, of another queue, had ended; without it the step would be shorter."""

    op: Op
    on: Op


def critical_waits(program: Program, chain: Chain, hardware: Hardware) -> list[Wait]:
    """The waits on the longest path to the end of the last simulated step, latest first, over two steps."""
    before, last = last_steps(program, chain, hardware, 2)
    count = len(program.ops)
    starts = [span.start_s for span in (*before, *last)]
    ends = [span.end_s for span in (*before, *last)]
    position = {op.name: number for number, op in enumerate(program.ops)}
    previous = _previous(program)
    at = count + max(n for n, op in enumerate(program.ops) if op.queue is Queue.COMPUTE)
    waits: list[Wait] = []
    while True:
        step, number = divmod(at, count)
        op = program.ops[number]
        others = [position[name] for name in op.waits]
        others = [step * count + n if n < number else (step - 1) * count + n for n in others]
        queue = step * count + previous[number] if previous[number] < number else (step - 1) * count + previous[number]
        earlier = [n for n in (queue, *others) if n >= 0]
        if not earlier:
            return waits
        latest = max(earlier, key=lambda n: ends[n])  # the queue's own where both end together
        if latest != queue and ends[latest] >= starts[at]:
            waits.append(Wait(op=op, on=program.ops[latest % count]))
        at = latest


def _previous(program: Program) -> list[int]:
    """Per operation the one before it in its queue, around the cycle."""
    last = {op.queue: number for number, op in enumerate(program.ops)}
    previous = []
    for number, op in enumerate(program.ops):
        previous.append(last[op.queue])
        last[op.queue] = number
    return previous


def polished(
    chain: Chain,
    hardware: Hardware,
    draft: Draft,
    rate: Callable[[Draft], Rating],
    *,
    tries: int,
    go_on: Callable[[float], bool],
) -> Iterator[Draft]:
    """Ever faster drafts. Ends after `tries` moves in a row that hardly gain, or when `go_on(step_s)` says so."""
    rating = rate(draft)
    best_s, left = rating.step_s, tries
    stages = {f"{direction}{block}": n for n, (direction, block) in enumerate(stage_order(len(chain.blocks)))}
    while left and go_on(best_s):
        moved = _moved(draft, critical_waits(rating.program, chain, hardware), list(rating.room_bytes), stages)
        if moved is None:
            return
        draft = moved
        rating = rate(draft)
        left -= 1
        if rating.step_s < best_s * (1 - _GAIN):
            left = tries
        if rating.step_s < best_s:
            best_s = rating.step_s
            yield draft


def _moved(draft: Draft, waits: Sequence[Wait], room: list[int], stages: dict[str, int]) -> Draft | None:
    """The draft with the waits' causes one stage away, where there is room; None where nothing can be moved."""
    journeys = {journey.tensor.name: journey for journey in draft.journeys}
    seen: set[str] = set()
    changed = False
    for wait in waits:
        # A fetch that waited for its memory, or a release that waited for its copy.
        if not ((wait.op.kind is OpKind.FETCH and wait.on.kind is OpKind.ALLOC) or wait.op.kind is OpKind.FREE):
            continue
        kind, name = wait.op.subject[0], wait.op.subject[2:]
        if wait.op.name in seen or kind == "a" or name not in journeys:
            continue
        seen.add(wait.op.name)
        stage = stages[wait.op.stage]
        move = _fetch_earlier if wait.op.kind is OpKind.FETCH else _free_later
        after = move(journeys[name], kind, stage, room)
        changed = changed or after is not journeys[name]
        journeys[name] = after
    if not changed:
        return None
    return replace(draft, journeys=tuple(journeys[j.tensor.name] for j in draft.journeys))


def _fetch_earlier(journey: Journey, kind: str, stage: int, room: list[int]) -> Journey:
    stages = len(room)
    if kind == "g":
        if journey.fetch != stage or stage == 0 or room[stage - 1] < journey.tensor.gradient_bytes:
            return journey
        room[stage - 1] -= journey.tensor.gradient_bytes
        return replace(journey, fetch=stage - 1)

    def move(trip: Trip, size: int) -> Trip:
        before = (trip.prefetch - 1) % stages
        if trip.prefetch != stage or room[before] < size:
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

    return _with_trips(journey, kind, move)


def _free_later(journey: Journey, kind: str, stage: int, room: list[int]) -> Journey:
    stages, after = len(room), (stage + 1) % len(room)
    if kind == "g":
        if journey.drop != stage or stage + 1 >= stages or room[after] < journey.tensor.gradient_bytes:
            return journey
        room[after] -= journey.tensor.gradient_bytes
        return replace(journey, drop=after)

    def move(trip: Trip, size: int) -> Trip:
        away = (trip.prefetch - trip.evict) % stages or stages
        if trip.evict != stage or trip.offload is None or away < 2 or room[after] < size:
            return trip
        room[after] -= size
        return replace(trip, evict=after)

    return _with_trips(journey, kind, move)


def _with_trips(journey: Journey, kind: str, move: Callable[[Trip, int], Trip]) -> Journey:
    """The journey itself where `move` changes no trip of this kind."""
    if kind == "w":
        trips = tuple(move(trip, journey.tensor.bytes) for trip in journey.weight)
        return journey if trips == journey.weight else replace(journey, weight=trips)
    trips = tuple(move(trip, journey.tensor.state_bytes) for trip in journey.states)
    return journey if trips == journey.states else replace(journey, states=trips)

"""Finds places in the device's memory for the tensors of slices (micro-batches) with fewer tokens than the plan's.

A plan's places are for slices of the largest shape. Code for a shorter slice is traced anew, and nearly always does the
same with smaller tensors: then each lies in the larger one's place. Sometimes it does something else: a row shorter
than the attention window needs no mask. Then a tensor that outlives the block's run takes the place of one that stays
as long, and a tensor that does not takes any free part of the run's temporary places. What kernels allocate internally
is not known for a shorter slice; it is hardly ever more than for the longest one, and gets the same places. So a short
slice uses only memory that a long one in its stead would use, whatever the other slices of the step are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.schedule.allocations import Allocations, Event, allocations
from planner.schedule.chain import Chain
from planner.schedule.compile import Program
from planner.schedule.places import Arrangement, Place, few_rounds, grains, key_of

LOOSE = -1
"""The offset that stands for a tensor without a fixed place."""
_NEVER = 2**62
_Taken = tuple[int, int, int, int]
"""Memory taken for a time: first byte, end byte, first event and end event of an operation."""


@dataclass(frozen=True, slots=True)
class _Life:
    """A tensor that an operation allocates with its event `born`. Operation number `until` releases it with its event
    `died`."""

    number: int
    bytes: int
    most: bool
    own: bool
    born: int
    until: int
    died: int


def places_of_shorter(
    program: Program, chain: Chain, arrangement: Arrangement, shorter: Chain
) -> dict[str, tuple[Place, ...]]:
    """Maps each operation (its `key_of`) to the places of all tensors that it allocates for a shorter slice, in order.

    `shorter`: the chain whose `lifetimes` are those of the shorter slice. The places lie within those that
    `arrangement` has for slices of `chain`.
    """
    few = few_rounds(program)
    planned, actual = allocations(few, chain), allocations(few, shorter)
    extents: dict[int, tuple[int, int]] = {}  # tensor -> where it begins and ends
    for item, events in actual.standing.items():
        large = [event for event in events if event.bytes > arrangement.small_bytes]
        extents |= {
            event.number: (place.offset, place.offset + place.bytes)
            for event, place in zip(large, arrangement.standing[item], strict=True)
        }
    steps: dict[str, tuple[Place, ...]] = {}
    moved = False  # some tensors lie elsewhere than the longest slice's
    both = zip(planned.steps, _lives(planned), _lives(actual), strict=True)
    for at, ((op, _), its, lives) in enumerate(both):
        planned_places = iter(arrangement.steps.get(key_of(op, program.rounds), ()))
        places = [next(planned_places) if life.bytes > arrangement.small_bytes else None for life in its]
        leaving = [(*extents[n], -1, event) for n, event in _leaving(actual.steps[at][1], lives) if n in extents]
        scratch = [(life.bytes, place) for life, place in zip(its, places, strict=True) if life.own]
        order = [life.own for life in its]
        places = [place for life, place in zip(its, places, strict=True) if not life.own]
        its, lives = ([life for life in some if not life.own] for some in (its, lives))
        chosen, alike = places, _alike(its, lives)
        if not alike or (moved and _clash(at, lives, places, leaving)):
            chosen, moved = _chosen(at, its, places, lives, leaving), True
        for life, place in zip(lives, chosen, strict=True):
            if place is not None:
                extents[life.number] = place.offset, place.offset + grains(life.bytes)
        found_places = [
            place
            if place is not None and place.most
            else Place(bytes=grains(life.bytes), offset=LOOSE if place is None else place.offset)
            for life, place in zip(lives, chosen, strict=True)
        ]
        sizes = {one.bytes: other.bytes for one, other in zip(its, lives, strict=True)} if alike else {}
        steps.setdefault(key_of(op, program.rounds), _with_own(found_places, order if alike else [], scratch, sizes))
    return steps


def _with_own(
    places: Sequence[Place],
    order: Sequence[bool],
    scratch: Sequence[tuple[int, Place | None]],
    sizes: Mapping[int, int],
) -> tuple[Place, ...]:
    """The `places`, together with those of the `scratch` of the longest slice's operation, which serve any scratch of
    at most as many bytes.

    So that scratch does not take a tensor's place, a place for its most likely size is also in the `order`. `sizes`:
    size of a tensor in the longest slice -> in the shorter one. If scratch is as large as a tensor in the longest
    slice, as a copy is, it is taken to be so here, too. Otherwise its size may come from the card or from whole blocks,
    and stays.
    """
    merged: list[Place] = []
    remaining, its = iter(places), iter(scratch)
    for is_own in order:
        if not is_own:
            merged.append(next(remaining))
            continue
        size, place = next(its)
        if place is not None:
            merged.append(Place(bytes=grains(sizes.get(size, size)), offset=place.offset, own=True))
    common = (
        Place(bytes=place.bytes, offset=place.offset, most=True, own=True) for _, place in scratch if place is not None
    )
    return (*merged, *remaining, *common)


def _lives(allocated: Allocations) -> Iterator[list[_Life]]:
    """The lives of what each operation allocates, in order."""
    ends: dict[int, tuple[int, int]] = {}
    for at, (_, events) in enumerate(allocated.steps):
        ends |= {event.number: (at, n) for n, event in enumerate(events) if not event.bytes}
    for _, events in allocated.steps:
        yield [
            _Life(e.number, e.bytes, e.most, e.own, n, *ends.get(e.number, (len(allocated.steps), 0)))
            for n, e in enumerate(events)
            if e.bytes
        ]


def _alike(its: Sequence[_Life], lives: Sequence[_Life]) -> bool:
    """Whether the shorter slice allocates and releases in the same order as the longest one, with no larger tensors."""
    return len(its) == len(lives) and all(
        (one.until, one.most) == (other.until, other.most) and one.bytes >= other.bytes
        for one, other in zip(its, lives, strict=True)
    )


def _clash(at: int, lives: Sequence[_Life], places: Sequence[Place | None], leaving: Sequence[_Taken]) -> bool:
    """Whether one of these places is taken by a tensor that was there before and has not left yet."""
    return any(
        place is not None and _in_the_way(place.offset, grains(life.bytes), leaving, life, at)
        for life, place in zip(lives, places, strict=True)
    )


def _leaving(events: Sequence[Event], lives: Sequence[_Life]) -> Iterator[tuple[int, int]]:
    """Tensors that were there before the operation and leave during it, each with the event that releases it."""
    new_numbers = {life.number for life in lives}
    return ((e.number, n) for n, e in enumerate(events) if not e.bytes and e.number not in new_numbers)


def _chosen(
    at: int, its: Sequence[_Life], places: Sequence[Place | None], lives: Sequence[_Life], leaving: Sequence[_Taken]
) -> list[Place | None]:
    """A place for each of the `lives` of operation number `at`, within the `places` planned for `its` lives; None for a
    tensor that gets no place. `leaving`: memory of tensors that were there before and leave."""
    chosen: list[Place | None] = [None] * len(lives)
    unused = [(planned, place) for planned, place in zip(its, places, strict=True) if place is not None]
    busy = list(leaving)
    staying = [number for number, life in enumerate(lives) if life.until > at]
    for number in sorted(staying, key=lambda n: -lives[n].bytes):
        life = lives[number]
        enough = [
            (planned.until, place.bytes, abs(planned.died - life.died), index)
            for index, (planned, place) in enumerate(unused)
            if planned.until >= life.until and planned.most == life.most and place.bytes >= grains(life.bytes)
            if not _in_the_way(place.offset, grains(life.bytes), busy, life, at)
        ]
        if enough:
            _, place = unused.pop(min(enough)[-1])
            chosen[number] = place
            busy.append((place.offset, place.offset + grains(life.bytes), life.born, _NEVER))
    area = _joined((place.offset, place.offset + place.bytes) for planned, place in unused)
    for number, life in enumerate(lives):
        if life.until == at:
            size = grains(life.bytes)
            met = sorted(_met(busy, life, at))
            start = next((s for low, high in area for s, e in _gaps(low, high, met) if e - s >= size), None)
            if start is not None:
                chosen[number] = Place(bytes=size, offset=start, most=life.most)
                busy.append((start, start + size, life.born, life.died))
    return chosen


def _in_the_way(offset: int, size: int, busy: Sequence[_Taken], life: _Life, at: int) -> bool:
    return any(start < offset + size and offset < end for start, end in _met(busy, life, at))


def _met(busy: Sequence[_Taken], life: _Life, at: int) -> Iterator[tuple[int, int]]:
    """The memory that is taken at some time of this life, in operation number `at`."""
    died = life.died if life.until == at else _NEVER
    return ((start, end) for start, end, since, until in busy if since < died and life.born < until)


def _joined(intervals: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _gaps(low: int, high: int, met: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The gaps between `low` and `high` that `met`, which is sorted, leaves."""
    for start, end in met:
        if start > low:
            yield low, min(start, high)
        low = max(low, end)
        if low >= high:
            return
    yield low, high

"""Decides which tensors of a step need fixed places in the device's memory and when, and proves that places do not
overlap.

PyTorch's allocator takes the smallest gap that is large enough, and does not know what comes next. So it loses a fifth
to a half of a plan's memory to gaps. But a program's order is known, and with it when each tensor comes and goes:
`planner.arrange` finds places in which nearly nothing is lost.

Tensors that are there all the time lie at the beginning, all others after them. Tensors of up to a megabyte are not
placed: together they are small beside the others, and share a part of the memory, the loose part.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.schedule.allocations import Event, allocations
from planner.schedule.chain import Chain
from planner.schedule.compile import Op, OpKind, Program

GRAIN_BYTES = 512
"""PyTorch's allocators round sizes up to a multiple of this; addresses are multiples of it, too."""
SMALL_BYTES = 2**20
"""Tensors of up to this many bytes get no fixed place."""

PAGE_BYTES = 2**21
_LOOSE_GAPS = 4  # the loose part loses a quarter to gaps, and two gaps that are just too small


class Misplaced(ValueError):
    """Two tensors that exist at the same time would overlap in memory."""


@dataclass(slots=True)
class Span:
    """The lifetime of a tensor that needs a place, from `start` to before `end`. Times are counted in placed
    allocations since the step began.

    A tensor that does not outlive one run of a block on a slice has one span for all slices of the stage: `group`
    numbers the stage, `low` and `high` are its life within the run. A tensor that is there when a step begins, leaves
    and comes back is also there until `before`. `most`: the tensor has at most `bytes`, or stands for several.
    """

    bytes: int
    start: int
    end: int
    group: int = -1
    low: int = 0
    high: int = 0
    before: int = 0
    most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a tensor of `bytes` in the device's memory, `offset` bytes from the beginning. `most`: the place is
    for one tensor of at most `bytes`, or for several. `own`: the place is for scratch of a single operation."""

    bytes: int
    offset: int
    most: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """The places of all tensors of a step in the device's memory. `placed_bytes`: memory for tensors with a fixed
    place. `loose_bytes`: memory for the others, each of at most `small_bytes`.

    `standing`: maps each item on the device when a step begins to the places of its tensors. `steps`: maps each
    operation (its `key_of`) to the places of what it allocates, in order.
    """

    placed_bytes: int
    loose_bytes: int
    small_bytes: int
    standing: Mapping[str, tuple[Place, ...]]
    steps: Mapping[str, tuple[Place, ...]]

    @property
    def total_bytes(self) -> int:
        """Bytes of memory that the arrangement takes, with the part for small tensors."""
        return self.placed_bytes + self.loose_bytes


def key_of(op: Op, rounds: int) -> str:
    """An operation's name in `Arrangement.steps`. Rounds from the second to the last but one share the second's names,
    because they allocate the same."""
    number = 1 if 1 < op.round < rounds - 1 else op.round
    return f"{op.kind.value}@{op.stage}/{number}:{op.subject}"


def few_rounds(program: Program) -> Program:
    """The program with only its first two rounds and its last, because the others allocate the same as the second. The
    waits of the result are not valid."""
    ops = tuple(op for op in program.ops if op.round < 2 or op.round == program.rounds - 1)
    return replace(program, ops=ops)


def grains(size: int) -> int:
    """`size` in bytes, rounded up to a multiple of `GRAIN_BYTES`."""
    return -(-size // GRAIN_BYTES) * GRAIN_BYTES


@dataclass(frozen=True, slots=True)
class _Birth:
    """The allocation of a tensor: its size, when it came, and its number among the placed tensors of its operation.
    `item`: the item allocated."""

    bytes: int
    clock: int
    number: int
    key: str
    item: str = ""
    most: bool = False


class Spans:
    """The lifetimes of a step's tensors that need places, in an order that depends on the program alone.

    below_bytes     bytes of placed tensors that are always there
    loose_bytes     bytes for all tensors that are not placed
    """

    def __init__(self, program: Program, chain: Chain) -> None:
        """Collect the spans. `program` must be one that `planner.schedule.verify` accepts, and the chain must have
        `lifetimes`."""
        self.spans: list[Span] = []
        self._rounds = program.rounds
        self._found = allocated = allocations(few_rounds(program), chain)
        self._where: dict[str, list[int]] = {}  # operation -> spans of what it allocates
        self._alive: dict[int, _Birth] = {}
        self._shared: dict[tuple[int, int], int] = {}  # (group, number in the turn) -> span
        self._left: dict[str, list[int]] = {}  # item that is there when a step begins, and leaves -> spans
        self._loose = self._most_loose = self._clock = 0
        for item, events in allocated.standing.items():
            for number, event in enumerate(events):
                self._born(event.number, _Birth(event.bytes, 0, number, "", item))
        groups: dict[tuple[str, int], int] = {}
        for op, steps in allocated.steps:
            group = groups.setdefault((op.stage, op.round), len(groups)) if op.kind is OpKind.RUN else -1
            self._read(op, steps, group)
        self._end()
        stays = (events for item, events in allocated.standing.items() if item not in self._left)
        self.below_bytes = sum(grains(e.bytes) for events in stays for e in _large(events))
        gaps = self._most_loose // _LOOSE_GAPS + min(2 * SMALL_BYTES, self._most_loose)
        loose = self._most_loose + gaps + grains(allocated.others_bytes)
        self.loose_bytes = -(-loose // PAGE_BYTES) * PAGE_BYTES

    def _read(self, op: Op, events: Sequence[Event], group: int) -> None:
        """Begin or end spans with the allocations and releases of one operation."""
        key, base, count = key_of(op, self._rounds), self._clock, 0
        self._where[key] = [-1] * len(_large(events))
        mine = set()
        item = op.subject if op.kind is OpKind.ALLOC else ""
        for event in events:
            if event.bytes:
                self._born(event.number, _Birth(event.bytes, base + count, count, key, item, event.most))
                if event.bytes > SMALL_BYTES:
                    mine.add(event.number)
                    count += 1
                continue
            birth = self._alive.pop(event.number)
            if birth.bytes <= SMALL_BYTES:
                self._loose -= grains(birth.bytes)
            elif not birth.key:
                self._left.setdefault(birth.item, []).append(len(self.spans))
                self.spans.append(Span(grains(birth.bytes), 0, 0, before=base + count))
            elif group >= 0 and event.number in mine:
                self._share(birth, group, count, base + count)
            else:
                self._span(birth, base + count)
        self._clock = base + count + 1

    def _born(self, number: int, birth: _Birth) -> None:
        self._alive[number] = birth
        if birth.bytes <= SMALL_BYTES:
            self._loose += grains(birth.bytes)
            self._most_loose = max(self._most_loose, self._loose)

    def _span(self, birth: _Birth, end: int) -> None:
        self._where[birth.key][birth.number] = len(self.spans)
        self.spans.append(Span(grains(birth.bytes), birth.clock, end, most=birth.most))

    def _share(self, birth: _Birth, group: int, high: int, end: int) -> None:
        """The span of a tensor that does not outlive one run of a block; the other slices' tensors lie in the same
        place."""
        at = self._shared.get((group, birth.number))
        size = grains(birth.bytes)
        if at is None or (self.spans[at].bytes, self.spans[at].high) != (size, high):
            at = self._shared[group, birth.number] = len(self.spans)
            self.spans.append(Span(size, birth.clock, end, group, birth.number, high, most=birth.most))
        self.spans[at].end = end
        self._where[birth.key][birth.number] = at

    def _end(self) -> None:
        """End the spans of tensors that are there when the step ends: each came in the step and stays, or is back."""
        for birth in self._alive.values():
            if birth.key and birth.bytes > SMALL_BYTES:
                if birth.item in self._left:
                    at = self._left[birth.item][birth.number]
                    self.spans[at].start, self.spans[at].end = birth.clock, self._clock
                    self._where[birth.key][birth.number] = at
                else:
                    self._span(birth, self._clock)

    def least_bytes(self) -> int:
        """The most bytes that tensors with a fixed place take at the same time; no arrangement of places needs less."""
        changes: dict[int, int] = {}

        def there(start: int, end: int, size: int) -> None:
            changes[start] = changes.get(start, 0) + size
            changes[end] = changes.get(end, 0) - size

        for span in self.spans:
            if span.group < 0:
                there(span.start, span.end, span.bytes)
                there(0, span.before, span.bytes)
            else:  # in the first slice that has it, and in the last
                for start in {span.start, span.end - (span.high - span.low)}:
                    there(start, start + span.high - span.low, span.bytes)
        now = most = 0
        for at in sorted(changes):
            now += changes[at]
            most = max(most, now)
        return self.below_bytes + most

    def arrangement(self, offsets: Sequence[int]) -> Arrangement:
        """The arrangement with these byte offsets, one for each span; they are counted from the end of the tensors that
        are always there."""
        standing: dict[str, tuple[Place, ...]] = {}
        below, above = 0, self.below_bytes
        for item, events in self._found.standing.items():
            sizes = [grains(event.bytes) for event in _large(events)]
            if item in self._left:
                starts = [above + offsets[i] for i in self._left[item]]
            else:
                starts = [below + sum(sizes[:n]) for n in range(len(sizes))]
                below += sum(sizes)
            standing[item] = tuple(Place(bytes=size, offset=at) for size, at in zip(sizes, starts, strict=True))
        steps = {
            key: tuple(
                Place(bytes=self.spans[i].bytes, offset=above + offsets[i], most=self.spans[i].most) for i in spans
            )
            for key, spans in self._where.items()
            if spans
        }
        top = max((offset + span.bytes for offset, span in zip(offsets, self.spans, strict=True)), default=0)
        return Arrangement(
            placed_bytes=above + top,
            loose_bytes=self.loose_bytes,
            small_bytes=SMALL_BYTES,
            standing=standing,
            steps=steps,
        )

    def prove(self, arrangement: Arrangement) -> None:
        """Play through a step. Raises Misplaced if a tensor would overlap another that exists at the same time, or if
        the next step would not find in its place what stays on the device."""
        live = _Live()
        for item, events in self._found.standing.items():
            for event, place in zip(_large(events), arrangement.standing[item], strict=True):
                live.come(event.number, place, item)
        begun = live.places()
        for op, steps in self._found.steps:
            places = iter(arrangement.steps.get(key_of(op, self._rounds), ()))
            for event in steps:
                if event.bytes > SMALL_BYTES:
                    live.come(event.number, next(places), op.name)
                elif not event.bytes:
                    live.go(event.number)
        if live.places() != begun:
            raise Misplaced("what stays is not where the next step looks for it")


def _large(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.bytes > SMALL_BYTES]


class _Live:
    """The tensors in memory now, the lowest first."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._at: dict[int, tuple[Place, str]] = {}  # start -> what lies there
        self._of: dict[int, int] = {}  # tensor -> start

    def come(self, number: int, place: Place, name: str) -> None:
        where = bisect.bisect_left(self._starts, place.offset)
        for start in self._starts[max(0, where - 1) : where + 1]:
            other, its_name = self._at[start]
            if start < place.offset + place.bytes and place.offset < start + other.bytes:
                raise Misplaced(f"{name} has memory in which that of {its_name} lies")
        self._starts.insert(where, place.offset)
        self._at[place.offset], self._of[number] = (place, name), place.offset

    def go(self, number: int) -> None:
        start = self._of.pop(number, None)
        if start is not None:
            del self._at[start]
            self._starts.pop(bisect.bisect_left(self._starts, start))

    def places(self) -> list[tuple[int, int]]:
        return [(start, self._at[start][0].bytes) for start in self._starts]

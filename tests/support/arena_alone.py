"""The allocator in C by itself: over a driver that counts, and fed with what a plan's steps allocate."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.arrange.pack import with_places
from planner.cpu import build
from planner.schedule.allocations import Allocations, allocations
from planner.schedule.chain import Chain
from planner.schedule.compile import OpKind, compile_program
from planner.schedule.places import Place, Spans, key_of
from planner.schedule.plan import Plan
from planner.schedule.shorter import places_of_shorter
from tests.support.random_plans import random_plan
from worker.runtime.arena import SOURCE, Counts, _as_c, slice_of

MIB = 2**20
SMALL = MIB


class Stub:
    """A driver of some bytes, and the allocator over it. Errors are written down: through ctypes none may be thrown."""

    def __init__(self, driver_bytes: int, *, checked: bool = True) -> None:
        """`checked`: no two tensors share memory, which takes long to look at."""
        self._checked = checked
        self.left, self.waits, self.last_error, self.errors = driver_bytes, 0, 0, list[str]()
        self.segments: dict[int, int] = {}
        self.top = 1 << 40
        self.live: dict[int, int] = {}
        library = self.library = build.load(SOURCE)
        address = ctypes.c_void_p
        self._called = (
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(address), ctypes.c_size_t)(self._malloc),
            ctypes.CFUNCTYPE(ctypes.c_int, address)(self._free),
            ctypes.CFUNCTYPE(ctypes.c_int)(self._wait),
            ctypes.CFUNCTYPE(ctypes.c_int)(self._get_last_error),
            ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: self.errors.append(text.decode())),
        )
        library.arena_driver(*self._called)
        library.arena_allocate.restype = address
        library.arena_allocate.argtypes = [ctypes.c_int64, ctypes.c_int, address]
        library.arena_free.argtypes = [address, ctypes.c_int64, ctypes.c_int, address]
        library.arena_record.argtypes = [address, address]
        library.arena_open.argtypes = [ctypes.c_int64] * 3
        library.arena_limit.argtypes = [ctypes.c_int64]
        library.arena_expect.argtypes = [address, *[ctypes.c_int64] * 2]
        library.arena_count.restype = ctypes.c_int64
        library.arena_limit(2**62)
        library.arena_reset_peaks()
        self._places = _as_c(())

    def _malloc(self, target: ctypes._Pointer[ctypes.c_void_p], size: int) -> int:
        if size > self.left:
            self.last_error = 2
            return 2
        self.left -= size
        self.segments[self.top] = size
        target[0] = ctypes.c_void_p(self.top)
        self.top += size + 64 * MIB
        return 0

    def _free(self, address: int) -> int:
        self.left += self.segments.pop(address)
        return 0

    def _wait(self) -> int:
        self.waits += 1
        return 0

    def _get_last_error(self) -> int:
        code, self.last_error = self.last_error, 0
        return code

    def open(self, placed: int, loose: int, small: int = SMALL) -> int:
        """The arena's address."""
        before = set(self.segments)
        assert self.library.arena_open(placed, loose, small)
        (base,) = set(self.segments) - before
        return base

    def expect(self, *places: tuple[int, int], small: int = SMALL) -> None:
        """(bytes, offset) of what comes with more than `small` bytes."""
        self.expect_places([Place(bytes=size, offset=offset) for size, offset in places], small=small)

    def expect_places(self, places: Sequence[Place], *, small: int = SMALL) -> None:
        self._places = _as_c(places)
        self.library.arena_expect(self._places, len(places), small)

    def expect_nothing(self) -> None:
        self.library.arena_expect(None, 0, 0)

    def get(self, size: int, stream: int = 0) -> int | None:
        found: int | None = self.library.arena_allocate(size, 0, stream)
        if found is not None:
            end = found + -(-size // 512) * 512
            self.live[found] = end - found
            assert not self._checked or all(
                end <= at or at + have <= found for at, have in self.live.items() if at != found
            ), "on another tensor"
            assert any(at <= found and end <= at + have for at, have in self.segments.items())
        return found

    def free(self, *addresses: int | None) -> None:
        for address in addresses:
            if address is not None:
                self.library.arena_free(address, self.live.pop(address), 0, 0)

    @property
    def counts(self) -> Counts:
        return Counts(*(int(self.library.arena_count(which)) for which in range(7)))

    def close(self) -> None:
        """Nothing is left."""
        self.library.arena_close()
        self.free(*self.live)
        self.library.arena_empty()
        assert not self.segments and self.counts.allocated == self.counts.reserved == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What became of a plan's allocations: the most that was taken from the driver, how often the driver was asked
    after the first step, how many tensors did not find their places."""

    reserved_bytes: int
    calls: int
    strays: int


def shorter(chain: Chain, other: Chain) -> Chain:
    """`chain` with the lifetimes of `other`, which is the same model for shorter slices."""
    kinds = {block.kind: its.kind for block, its in zip(other.blocks, chain.blocks, strict=True)}
    lifetimes = tuple(replace(found, kind=kinds[found.kind]) for found in other.lifetimes)
    return replace(chain, lifetimes=lifetimes, frame_lifetimes=other.frame_lifetimes)


def replay(
    plan: Plan, chain: Chain, *, steps: int = 3, checked: bool = False, others: Sequence[Chain] = (), seed: int = 0
) -> Replay:
    """What the steps of a plan with places allocate, given to the allocator in the host's order, under the budget.
    `others`: from the second step on each slice is one of the chain's or of theirs (see `shorter`), by `seed`."""
    chance = random.Random(seed)
    stub, program = Stub(2**50, checked=checked), compile_program(plan, chain)
    found = Spans(program, chain).arrangement(plan.offsets)
    every = [allocations(program, one) for one in (chain, *others)]
    known = [_known(one) for one in every]
    places = [found.steps, *(places_of_shorter(program, chain, found, one) for one in others)]
    its = every[0]
    stub.open(found.placed_bytes, found.loose_bytes, found.small_bytes)
    stub.library.arena_limit(plan.gpu_budget_bytes)
    there: dict[str, list[int | None]] = {}
    stub.get(its.others_bytes)
    for item, events in its.standing.items():
        stub.expect_places(found.standing.get(item, ()))
        there[item] = [stub.get(event.bytes) for event in events]
    calls = 0
    for step in range(steps):
        names: dict[object, int | None] = {}
        for item, events in its.standing.items():
            names |= zip((event.number for event in events), there[item], strict=True)
        which = [chance.randrange(len(every)) if step else 0 for _ in range(plan.rounds * plan.slices)]
        for at, (op, _) in enumerate(its.steps):
            k = slice_of(op, plan.slices)
            one = 0 if k is None else which[k]
            events = every[one].steps[at][1]
            stub.expect_places(places[one].get(key_of(op, plan.rounds), ()), small=0 if one else found.small_bytes)
            new = []
            for event in events:
                name = known[one].get(event.number, event.number)
                if event.bytes:
                    names[name] = stub.get(event.bytes)
                    new.append(names[name])
                else:
                    stub.free(names.pop(name))
            if op.kind is OpKind.ALLOC and op.subject in there:
                there[op.subject] = new
        stub.expect_nothing()
        if step == 0:
            calls = stub.counts.mallocs + stub.counts.frees
    counts = stub.counts
    stub.close()
    return Replay(
        reserved_bytes=counts.most_reserved, calls=counts.mallocs + counts.frees - calls, strays=counts.strays
    )


def _known(allocated: Allocations) -> dict[int, tuple[int, int]]:
    """Number of a tensor that outlives its operation -> the operation's number, and how many such it has made before.
    These are the same for slices of all lengths, whose losses are computed in different numbers of turns."""
    released = {e.number: at for at, (_, events) in enumerate(allocated.steps) for e in events if not e.bytes}
    found: dict[int, tuple[int, int]] = {}
    for at, (_, events) in enumerate(allocated.steps):
        staying = [event.number for event in events if event.bytes and released.get(event.number) != at]
        found |= {number: (at, n) for n, number in enumerate(staying)}
    return found


def replay_random(chain: Chain, seed: int, *, others: Sequence[Chain] = ()) -> tuple[Plan, Replay]:
    """A random plan with places, and what becomes of its steps under a budget of its peak."""
    plan = with_places(random_plan(chain, random.Random(seed)), chain)
    plan = replace(plan, gpu_budget_bytes=plan.gpu_peak_bytes)
    return plan, replay(plan, chain, others=others, seed=seed)

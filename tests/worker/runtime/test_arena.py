"""The allocator in C, driven by its own functions over a driver that counts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support.arena_alone import MIB, SMALL, Stub

STREAM = 7


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub(1000 * MIB)
    yield made
    made.close()


def test_a_tensor_goes_where_it_has_its_place(stub: Stub) -> None:
    base = stub.open(100 * MIB, 2 * MIB)
    stub.expect((4 * MIB, 60 * MIB), (8 * MIB, 10 * MIB), (4 * MIB, 20 * MIB))
    assert stub.get(4 * MIB) == base + 60 * MIB
    assert stub.get(8 * MIB - 5) == base + 10 * MIB
    assert stub.get(4 * MIB) == base + 20 * MIB
    assert stub.counts.strays == 0 and len(stub.segments) == 1


def test_places_are_taken_in_their_order_whatever_comes_between(stub: Stub) -> None:
    base = stub.open(100 * MIB, 32 * MIB)
    stub.expect((4 * MIB, 60 * MIB), (8 * MIB, 10 * MIB))
    stray = stub.get(3 * MIB)  # a kernel's own memory, which no plan knows
    assert stray is not None and stray >= base + 100 * MIB
    assert (stub.get(8 * MIB), stub.get(4 * MIB)) == (base + 10 * MIB, base + 60 * MIB)


def test_a_place_in_which_something_lies_is_not_taken(stub: Stub) -> None:
    base = stub.open(100 * MIB, 2 * MIB)
    stub.expect((8 * MIB, 0))
    assert stub.get(8 * MIB) == base
    stub.expect((8 * MIB, 4 * MIB), (30 * MIB, 20 * MIB))
    other = stub.get(8 * MIB)
    assert other is not None and not base <= other < base + 102 * MIB  # in nobody's way
    assert stub.counts.strays == 1
    stub.free(other)
    stub.library.arena_empty()
    stub.library.arena_limit(102 * MIB)
    stub.expect((8 * MIB, 4 * MIB), (30 * MIB, 20 * MIB))
    assert stub.get(8 * MIB) == base + 8 * MIB  # the lowest that this operation does not want for something else
    assert stub.get(30 * MIB) == base + 20 * MIB


def test_small_tensors_lie_in_the_loose_part_and_then_beside(stub: Stub) -> None:
    base = stub.open(10 * MIB, 2 * MIB)
    stub.expect((2 * MIB, 0))
    one, two = stub.get(MIB), stub.get(MIB)
    assert (one, two) == (base + 10 * MIB, base + 11 * MIB)
    third = stub.get(MIB)
    assert third is not None and not base <= third < base + 12 * MIB
    stub.free(one)
    assert stub.get(MIB // 2) == base + 10 * MIB


def test_what_may_not_lie_beside_lies_in_gaps_and_else_there_is_no_memory(stub: Stub) -> None:
    base = stub.open(10 * MIB, 2 * MIB)
    stub.library.arena_limit(12 * MIB)
    stub.expect((4 * MIB, 0))
    assert stub.get(5 * MIB) == base + 4 * MIB  # not where a tensor is to come
    assert stub.get(5 * MIB) is None
    assert stub.errors == [
        "CUDA out of memory. Tried to allocate 5.00 MiB: 5.0 MiB allocated, 12.0 MiB reserved, at most 12.0 MiB"
    ]
    assert stub.get(4 * MIB) == base


def test_a_failed_call_of_the_driver_leaves_no_error_behind(stub: Stub) -> None:
    """CUDA keeps it for the thread, and PyTorch would raise it from the next kernel."""
    stub.left = 30 * MIB
    found = [stub.get(9 * MIB) for _ in range(3)]
    assert None not in found and stub.counts.mallocs > len(stub.segments) and stub.last_error == 0
    assert stub.get(9 * MIB) is None and stub.last_error == 0


def test_where_small_tensors_are_listed_too_each_has_its_place_or_is_loose(stub: Stub) -> None:
    base = stub.open(100 * MIB, 2 * MIB)
    stub.expect((2 * MIB, 0), (MIB // 2, 72 * MIB), (MIB // 4, -1), (MIB // 2, 80 * MIB), small=0)
    assert stub.get(MIB // 4) == base + 100 * MIB
    assert stub.get(MIB // 2) == base + 72 * MIB
    assert stub.get(2 * MIB) == base
    assert stub.get(MIB // 2) == base + 80 * MIB
    assert stub.get(MIB // 2) == base + 100 * MIB + MIB // 4  # that was not listed
    assert stub.counts.strays == 0


def test_what_is_in_no_plan_uses_the_arena_too(stub: Stub) -> None:
    base = stub.open(100 * MIB, 2 * MIB)
    stub.expect((60 * MIB, 0))
    assert stub.get(60 * MIB) == base
    stub.expect_nothing()
    assert stub.get(30 * MIB) == base + 60 * MIB
    assert len(stub.segments) == 1


def test_another_streams_memory_is_nobody_elses_and_goes_at_once(stub: Stub) -> None:
    stub.open(10 * MIB, 2 * MIB)
    found = stub.get(MIB, STREAM)
    assert len(stub.segments) == 2
    stub.free(found)
    assert len(stub.segments) == 1


def test_memory_that_another_stream_uses_is_free_when_the_device_is_done(stub: Stub) -> None:
    stub.open(10 * MIB, 2 * MIB)
    found = stub.get(MIB)
    stub.library.arena_record(found, STREAM)
    stub.free(found)
    assert stub.waits == 1


def test_a_closed_arena_goes_when_the_last_tensor_does(stub: Stub) -> None:
    stub.open(10 * MIB, 2 * MIB)
    found = stub.get(3 * MIB)
    stub.library.arena_close()
    assert len(stub.segments) == 1
    stub.free(found)
    assert not stub.segments


def test_an_arena_that_is_in_use_is_not_replaced(stub: Stub) -> None:
    stub.open(10 * MIB, 2 * MIB)
    found = stub.get(3 * MIB)
    assert not stub.library.arena_open(10 * MIB, 2 * MIB, SMALL)
    stub.free(found)
    stub.open(20 * MIB, 2 * MIB)
    assert sum(stub.segments.values()) == 22 * MIB


def test_without_an_arena_memory_is_kept_and_given_back_where_it_runs_out(stub: Stub) -> None:
    one = stub.get(600 * MIB)
    stub.free(one)
    assert stub.get(500 * MIB) == one  # kept
    stub.free(one)
    assert stub.get(900 * MIB) is not None  # not beside it
    assert stub.get(200 * MIB) is None
    assert stub.get(0) is None and len(stub.errors) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_two_tensors_ever_share_memory_and_none_is_lost(stub: Stub, seed: int) -> None:
    chance = random.Random(seed)
    stub.library.arena_limit(400 * MIB)
    if seed % 3:
        stub.open(200 * MIB, 20 * MIB)
    for _ in range(1500):
        drawn = chance.random()
        if drawn < 0.05:
            places = [(512 * chance.randint(1, 20000), 512 * chance.randint(0, 380000)) for _ in range(8)]
            stub.expect(*places, small=chance.choice((0, SMALL)))
            sizes = [size for size, _ in places]
        elif drawn < 0.08:
            stub.expect_nothing()
        elif drawn < 0.55:
            known = chance.random() < 0.5 and "sizes" in locals()
            stub.get(chance.choice(sizes) if known else chance.randint(1, 10 * MIB), STREAM * (chance.random() < 0.02))
        elif stub.live:
            stub.free(chance.choice(list(stub.live)))
    assert stub.counts.allocated == sum(stub.live.values())
    assert stub.counts.reserved == sum(stub.segments.values()) <= 400 * MIB

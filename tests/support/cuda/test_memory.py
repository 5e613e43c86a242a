"""The model of the caching allocator beside what PyTorch documents and its source says."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.memory import MIB, Allocator, Arena, Block

TOTAL = 100 * MIB


class Driver:
    """What an allocator has beside it: streams are names, done when they are in `done`."""

    def __init__(self) -> None:
        self.done: set[str] = set()
        self.freed: list[int] = []
        self.finished = 0
        self.allocator = Allocator(
            Arena(1024 * MIB),
            free_bytes=lambda: TOTAL - self.allocator.reserved.now,
            finish=self._finish,
            done=lambda stream: lambda: stream in self.done,
            freed=lambda block: self.freed.append(block.address),
            mapped=lambda address, size: None,
        )

    def _finish(self) -> None:
        self.finished += 1
        self.done |= {"copies", "main"}

    def get(self, size: int, stream: str = "main") -> Block:
        return self.allocator.allocate(size, stream)

    def free(self, *blocks: Block) -> None:
        for block in blocks:
            self.allocator.free(block)

    @property
    def reserved(self) -> int:
        return self.allocator.reserved.now


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (20 * MIB, 20 * MIB, 20 * MIB),
    ],
)
def test_sizes_are_rounded(driver: Driver, requested: int, block: int, segment: int) -> None:
    got = driver.get(requested)
    assert (got.size, driver.reserved) == (block, segment)
    assert (driver.allocator.requested.now, driver.allocator.allocated.now) == (requested, block)


def test_small_blocks_share_a_segment_until_it_is_full(driver: Driver) -> None:
    blocks = [driver.get(512) for _ in range(4096)]
    assert len({b.address for b in blocks}) == 4096 and driver.reserved == 2 * MIB
    driver.get(1)
    assert driver.reserved == 4 * MIB


def test_a_large_block_is_split_where_more_than_a_mebibyte_is_left(driver: Driver) -> None:
    whole = driver.get(16 * MIB)
    driver.free(whole)
    assert driver.get(15 * MIB).size == 16 * MIB  # what is left is lost
    driver.allocator.free(whole)
    assert driver.get(15 * MIB - 512).size == 15 * MIB - 512
    assert driver.get(MIB + 512).address == whole.address + 15 * MIB - 512
    assert driver.reserved == 16 * MIB


def test_what_is_free_is_reused_at_once_and_the_smallest_that_fits_is_taken(driver: Driver) -> None:
    large, small, _ = driver.get(14 * MIB), driver.get(12 * MIB), driver.get(10 * MIB)
    driver.free(large, small)
    assert driver.get(11 * MIB).address == small.address
    assert driver.get(13 * MIB).address == large.address


def test_what_is_free_is_reused_by_its_own_stream_only(driver: Driver) -> None:
    block = driver.get(4 * MIB)
    driver.free(block)
    assert driver.get(4 * MIB, "copies").address != block.address
    assert driver.get(4 * MIB).address == block.address


def test_small_and_large_blocks_do_not_mix(driver: Driver) -> None:
    driver.free(driver.get(4 * MIB))
    driver.get(512)
    assert driver.reserved == 22 * MIB


def test_free_neighbours_become_one_in_any_order(driver: Driver) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
        blocks = [driver.get(6 * MIB) for _ in range(3)]
        for number in order:
            driver.free(blocks[number])
        assert driver.reserved == 20 * MIB
        whole = driver.get(20 * MIB)
        assert (whole.size, driver.reserved) == (20 * MIB, 20 * MIB)
        driver.free(whole)


def test_gaps_that_are_no_neighbours_do_not_help(driver: Driver) -> None:
    first, _, last = driver.get(7 * MIB), driver.get(6 * MIB), driver.get(7 * MIB)
    driver.free(first, last)
    driver.get(9 * MIB)
    assert driver.reserved == 40 * MIB


def test_where_memory_runs_out_whole_free_segments_go_back_first(driver: Driver) -> None:
    driver.free(*[driver.get(30 * MIB) for _ in range(3)])
    used = driver.get(4 * MIB)  # splits one of them
    assert driver.get(50 * MIB).size == 50 * MIB
    assert (driver.allocator.returned, driver.allocator.retries, driver.reserved) == (2, 1, 80 * MIB)
    assert driver.finished  # the driver waits for the device
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 40\.00 MiB"):
        driver.get(40 * MIB)
    assert (driver.allocator.failures, used.size) == (1, 4 * MIB)


def test_a_cap_counts_segments_and_holds_new_ones_back_only(driver: Driver) -> None:
    block = driver.get(12 * MIB)
    driver.allocator.cap_bytes = 13 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        driver.get(1)
    driver.free(block)
    assert driver.get(12 * MIB).address == block.address
    driver.allocator.cap_bytes = 14 * MIB
    driver.get(1)


def test_segments_that_are_partly_used_stay_when_the_cache_is_emptied(driver: Driver) -> None:
    one, other, _ = driver.get(4 * MIB), driver.get(30 * MIB), driver.get(512)
    driver.free(other)
    driver.allocator.release()
    assert driver.reserved == 22 * MIB
    driver.free(one)
    driver.allocator.release()
    assert driver.reserved == 2 * MIB


def test_a_recorded_streams_work_keeps_a_block_from_reuse(driver: Driver) -> None:
    block = driver.get(4 * MIB)
    block.users = ("copies",)
    driver.free(block)
    assert driver.allocator.allocated.now == 0 and driver.freed == []
    assert driver.get(4 * MIB).address != block.address
    driver.done.add("copies")
    assert driver.get(4 * MIB).address == block.address
    assert driver.freed == [block.address]


def test_where_memory_runs_out_recorded_streams_are_waited_for(driver: Driver) -> None:
    block = driver.get(60 * MIB)
    block.users = ("copies",)
    driver.free(block)
    assert driver.get(60 * MIB).address == block.address
    assert driver.finished


def test_peaks_are_the_most_since_they_were_reset(driver: Driver) -> None:
    driver.free(driver.get(30 * MIB), driver.get(3 * MIB))
    driver.allocator.reset_peaks()
    driver.get(5 * MIB)
    allocator = driver.allocator
    assert (allocator.allocated.peak, allocator.reserved.peak) == (5 * MIB, 50 * MIB)

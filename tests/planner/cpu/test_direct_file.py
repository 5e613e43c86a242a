"""Files that are read and written past the page cache, with sums of what passes."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from planner.cpu import build, direct_file
from planner.cpu.direct_file import DirectFile, sum_of
from tests.support.disks import no_room_beyond

PAGE = 4096
SIZES = (PAGE, 3 * PAGE, 2**20, 2**20 + PAGE, 17 * 2**20 + 5 * PAGE)
WAYS = ("threads in C", "Python's threads")


def mover(way: str) -> direct_file._Mover:
    try:
        return direct_file._Native() if way == WAYS[0] else direct_file._InPython()
    except build.CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mover(request.param)
    monkeypatch.setattr(direct_file, "_mover", lambda: found)


@pytest.fixture
def file(tmp_path: Path) -> DirectFile:
    file = DirectFile(tmp_path / "states")
    file.reserve(2 * SIZES[-1])
    return file


def memory(size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


def numbers(size: int) -> torch.Tensor:
    filled = memory(size)
    filled.view(torch.float32).normal_(generator=torch.Generator().manual_seed(size))
    return filled


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_what_is_read_with_the_same_sum(file: DirectFile, size: int) -> None:
    written, floats = numbers(size), size // 3 // 4 * 4
    before = file.write(PAGE, written, floats=floats)
    assert file.write(PAGE + size, numbers(PAGE)) is None
    file.flush()
    for asked in (floats, None):
        got = memory(size)
        found = file.read(PAGE, got, floats=asked)
        assert torch.equal(got, written)
        assert found == (before if asked is not None else None)
    assert before == sum_of(written.numpy(), floats) and before.finite


@pytest.mark.parametrize("size", SIZES)
def test_both_ways_find_the_same_sum(file: DirectFile, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written, found = numbers(size), set()
    for name in WAYS:
        monkeypatch.setattr(direct_file, "_mover", lambda name=name: mover(name))
        found.add(file.write(0, written, floats=size))
    assert len(found) == 1


def test_a_sum_tells_a_sector_that_is_missing_old_or_elsewhere() -> None:
    size, draw = 2**21 + PAGE, torch.Generator().manual_seed(1)
    whole = numbers(size).numpy()
    want, seen = sum_of(whole, 0).sum, set()
    for _ in range(40):
        at, other = (int(torch.randint(size // 512, (), generator=draw)) * 512 for _ in range(2))
        for content in (bytes(512), whole[other : other + 512].tobytes()):
            torn = whole.copy()
            torn[at : at + 512] = list(content)
            if (torn != whole).any():
                seen.add(sum_of(torn, 0).sum)
    swapped = whole.copy()
    swapped[: 2**20], swapped[2**20 : 2**21] = whole[2**20 : 2**21], whole[: 2**20]
    seen.add(sum_of(swapped, 0).sum)
    assert len(seen) == 81 and want not in seen


@pytest.mark.usefixtures("way")
def test_a_number_that_is_not_finite_is_seen_where_there_are_numbers(file: DirectFile) -> None:
    size = 2**20 + PAGE
    for at in (0, 31, 32, 1000, 2**18 - 1, 2**18, 2**18 + 700):
        for value in (math.inf, -math.inf, math.nan):
            written = numbers(size)
            written.view(torch.float32)[at] = value
            for floats, finite in ((size, False), (4 * at + 4, False), (4 * at, True)):
                found = file.write(0, written, floats=floats)
                assert found is not None and found.finite is finite, (at, value, floats)


@pytest.mark.usefixtures("way")
def test_reads_and_writes_of_many_threads_do_not_disturb_each_other(file: DirectFile) -> None:
    size, wrong = 5 * 2**20, list[int]()

    def run(number: int) -> None:
        written, got = numbers(size), memory(size)
        for turn in range(3):
            written[:PAGE] = 16 * number + turn
            put = file.write(number * size, written, floats=0)
            if file.read(number * size, got, floats=0) != put or not torch.equal(got, written):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("way")
def test_what_cannot_be_moved_is_an_error_with_the_name_of_the_file(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "states")
    with pytest.raises(OSError, match="states") as raised:
        file.read(0, memory(PAGE))
    assert raised.value.errno == errno.ENODATA
    with no_room_beyond(PAGE), pytest.raises(OSError, match="states") as raised:
        file.write(0, memory(2 * PAGE))
    assert raised.value.errno == errno.EFBIG or raised.value.errno == errno.ENOSPC
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write(0, memory(PAGE))


def test_what_is_reserved_takes_room_and_is_not_more_than_there_is(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "states")
    file.reserve(10 * PAGE)
    told = (tmp_path / "states").stat()
    assert told.st_size == 10 * PAGE <= 512 * told.st_blocks
    with pytest.raises(OSError, match=r"No space left|too large") as raised:
        file.reserve(2**60)
    assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)


def test_what_is_written_is_in_no_page_cache(file: DirectFile, tmp_path: Path) -> None:
    file.write(0, numbers(2**22))
    file.read(0, memory(2**22))
    with (tmp_path / "states").open("rb") as usual, mmap.mmap(usual.fileno(), 2**22, prot=mmap.PROT_READ) as mapped:
        there = (ctypes.c_ubyte * (len(mapped) // PAGE))()
        start = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), there) == 0
        assert not any(page & 1 for page in there)

"""What is measured is measured warm, on numbers, and beyond the caches."""

from __future__ import annotations

import pytest
import torch

from planner.measure import machine_rates as rates
from planner.measure.stopwatch import Stopwatch, keep_busy, warm_up, warm_up_by
from tests.support.cuda.device import CUDA, Device
from tests.support.cuda.memory import MIB

CPU = torch.device("cpu")


class Card:
    """A stopwatch whose times are given."""

    def __init__(self, *milliseconds: float) -> None:
        self._left = list(milliseconds)

    def seconds(self, work: object) -> float:
        return self._left.pop(0) / 1e3 if self._left else 1.0


def test_warming_up_ends_when_two_successive_times_are_alike() -> None:
    assert warm_up_by(Card(0.308, 0.226, 0.207, 0.208, 0.207), lambda: None) == 4
    assert warm_up_by(Card(0.2, 0.2), lambda: None) == 2


def test_warming_up_ends_by_its_count_where_times_never_settle() -> None:
    assert warm_up_by(Card(*[1.0, 2.0] * 50), lambda: None) == 16


def test_a_first_call_that_loads_kernels_keeps_no_device_busy_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_sleep", slept.append, raising=False)
    for issued_s in (0.0, 1e-3, 1.0):
        keep_busy(issued_s)
    assert slept == [2_000_000, 6_000_000, 202_000_000], "cycles: 1 ms, 3 ms, 0.1 s"


@pytest.mark.emulated
@pytest.mark.parametrize(("room_bytes", "has_room"), [(21 * MIB, True), (3 * MIB, False)])
def test_warming_up_has_one_product_at_a_time_and_goes_on_where_there_is_no_room(
    room_bytes: int, has_room: bool, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("planner.measure.stopwatch._SIDE", 1024)  # 4 MiB each, from segments of 20
    torch.cuda.empty_cache()
    monkeypatch.setattr(device, "total_bytes", device.total_bytes + room_bytes - device.free_bytes)
    monkeypatch.setattr(device, "dry", True)
    warm_up(CUDA, torch.float32)
    told = ["device: no room to warm up by torch.float32 products of 1024 by 1024, measured as it is"]
    assert caplog.messages == ([] if has_room else told)


def test_what_is_updated_is_four_times_the_last_cache_within_bounds() -> None:
    mib = 2**20
    assert rates._updated(0) == 4 * mib
    assert 16 * rates._updated(72 * mib) == 4 * 72 * mib  # weight, gradient and moments
    assert rates._updated(2**40) == 64 * mib


def test_the_processor_says_its_last_cache(monkeypatch, tmp_path) -> None:
    for number, size in enumerate(("48K", "2048K", "107520K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(rates, "_CACHE_SIZES", str(tmp_path))
    assert rates._last_cache_bytes() == 105 * 2**20
    assert rates._copied_bytes() == 105 * 2**20
    monkeypatch.setattr(rates, "_CACHE_SIZES", str(tmp_path / "none"))
    assert rates._last_cache_bytes() == 0


@pytest.mark.parametrize("count", [1000, 2**20 + 7])
def test_what_is_computed_with_is_random(count: int) -> None:
    numbers = rates._random(count, torch.bfloat16)
    assert (len(numbers), numbers.dtype) == (count, torch.bfloat16)
    assert len(numbers.unique()) > 500 and 0.015 < float(numbers.float().std()) < 0.025


def test_the_cpu_computes_as_it_issues() -> None:
    watch = Stopwatch(CPU, behind=True)
    assert watch.seconds(lambda: torch.ones(10)) > 0 and watch.issued_s == 0
    assert rates._operation_s(CPU) == 0

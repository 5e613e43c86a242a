"""Places of tensors on the device."""

from __future__ import annotations

from planner.schedule.places import grains


def test_a_tensor_takes_whole_grains() -> None:
    assert [grains(size) for size in (1, 511, 512, 513, 1024)] == [512, 512, 512, 1024, 1024]

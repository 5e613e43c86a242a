"""No small copy of a step lies on the link behind a large one that computing would then wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cuda import copies
from tests.support.cuda.device import CUDA, Device
from tests.support.cuda.streams import Mood
from tests.support.engines import data, learning_rate
from tests.support.late_engines import Case, engine_for
from worker.engine.engine import Engine
from worker.runtime.host_values import HostValues
from worker.runtime.machine import Batch
from worker.runtime.registered import pinned
from worker.runtime.small_copies import SmallCopies, packed_bytes

pytestmark = pytest.mark.emulated


class Link:
    """The copies of a step in the order in which they are issued, and how many bytes of each direction lie before them.

    behind    direction -> of each copy that computing waits for, the bytes on the link before it
    """

    def __init__(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.before = {"up": 0, "down": 0}
        self.behind: dict[str, list[int]] = {"up": [], "down": []}
        self._up, self._down = copies._to_device, copies._to_host
        monkeypatch.setattr(copies, "_to_device", self._to_device)
        monkeypatch.setattr(copies, "_to_host", self._to_host)

    def _to_device(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        self._see("up", source, waited=self.device.queues.current.number == 0 or source.dtype == torch.uint8)
        self._up(target, source, non_blocking)

    def _to_host(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        self._see("down", source, waited=self.device.queues.current.number == 0)
        self._down(target, source, non_blocking)

    def _see(self, way: str, source: Tensor, *, waited: bool) -> None:
        if waited:
            self.behind[way].append(self.before[way])
        self.before[way] += source.nbytes


@pytest.fixture
def link(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    return Link(device, monkeypatch)


def train(engine: Engine, step: int, batches: int) -> None:
    given, rest = data(step, batches)
    engine.step(given, learning_rate=learning_rate(step), **rest)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen2", "mixed", slices=3, clip=0.5),
        Case("qwen2", "ahead", slices=2, clip=0.5),
        Case("qwen2", "mixed", slices=2, rounds=2, clip=0.5),
    ],
    ids=str,
)
def test_computing_waits_for_no_copy_that_lies_behind_weights(case: Case, link: Link, device: Device) -> None:
    engine = engine_for(case)
    try:
        for step in range(3):
            train(engine, step, case.batches)
            engine.drain()
            if step == 0:
                link.behind = {"up": [], "down": []}
            link.before = {"up": 0, "down": 0}
        assert link.behind == {"up": [0, 0], "down": []}  # the batches of two steps, before all that they fetch
    finally:
        engine.close()


def stage(small: SmallCopies, batches: Sequence[Batch], least_bytes: int) -> list[dict[Any, Tensor]]:
    return small.stage(batches, pinned(packed_bytes(batches)), least_bytes)


def test_batches_lie_on_the_device_as_they_were_and_the_host_knows_them(device: Device) -> None:
    device.queues.set_mood(Mood(haste=(0.0,)))
    small = SmallCopies(CUDA, device.queues.default)
    masks = torch.tensor([[True, False, True]]), torch.tensor([[True, True]])
    given = [{"ids": torch.arange(3 + k).view(1, -1), "mask": masks[k], "rate": torch.tensor(0.5)} for k in range(2)]
    gaps = torch.arange(8)[::2]
    staged = stage(small, [*given, {"gaps": gaps}], 4096)
    assert staged[2]["gaps"] is gaps
    for batch, found in zip(given, staged, strict=False):
        pairs = {id(there): here for there, here in small.on_host(found)}
        for name, tensor in batch.items():
            there = found[name]
            assert there.device == CUDA and torch.equal(there.cpu(), tensor) and there.dtype == tensor.dtype
            assert torch.equal(pairs[id(there)], tensor)
    device.waits.clear()
    with HostValues(CUDA, small.on_host(staged[0])):
        assert not staged[0]["mask"].to(CUDA, copy=True).all()
    assert device.waits == []


def test_a_steps_batches_wait_for_the_readers_of_those_before(device: Device) -> None:
    device.queues.set_mood(Mood(haste=(0.0, 1.0)))  # computing comes late, copies at once
    small, read = SmallCopies(CUDA, device.queues.default), []
    for step in range(3):
        (batch,) = stage(small, [{"ids": torch.full((4,), step)}], 64)
        read.append(batch["ids"].clone())
        small.were_read()
    assert [t.tolist() for t in read] == [[step] * 4 for step in range(3)]


def test_what_is_copied_down_is_what_computing_made_and_waits_hold_its_memory(device: Device) -> None:
    device.queues.set_mood(Mood(haste=(1.0, 0.0)))  # copies come late
    small = SmallCopies(CUDA, device.queues.default)
    hosts = [torch.zeros(1).pin_memory() for _ in range(3)]
    arrivals = []
    for step, host in enumerate(hosts):
        arrivals.append(small.to_host(host, torch.full((1,), float(step), device=CUDA)))
        for _ in range(5):
            torch.full((1,), -1.0, device=CUDA)
    for step, (host, arrives) in enumerate(zip(hosts, arrivals, strict=True)):
        arrives()
        assert float(host) == step

"""Small copies between host and device, on streams of their own.

A copy engine ends what it has begun, and does one thing after another: on the computing stream four bytes that go down
behind a weight would keep all that computes waiting for as long as the weight takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.schedule.peak_moments import staged_size
from worker.runtime.machine import Batch


class SmallCopies:
    """Those of one machine. Methods are called by the thread that computes, on the `computing` stream."""

    def __init__(self, device: torch.device, computing: torch.cuda.Stream) -> None:
        self._computing = computing
        self._down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._room: Tensor | None = None
        self._hosts: dict[int, tuple[Tensor, Tensor]] = {}
        self._device = device
        self._sent: tuple[Tensor, torch.cuda.Event] | None = None

    def to_host(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy `source`, which computing has just made, to registered memory. Returns what waits for that, on the host:
        for its readers, who are done before the next copy to the same target."""
        self._let_go()
        there = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._down.wait_stream(self._computing)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        there.record(self._down)
        self._sent = source, there
        return there.synchronize

    def _let_go(self) -> None:
        """Of what was copied last. Its memory may be used again on the computing stream, behind that copy."""
        if self._sent is not None:
            self._computing.wait_event(self._sent[1])
            self._sent = None

    def stage(self, batches: Sequence[Batch], packed: Tensor, least_bytes: int) -> list[dict[Any, Tensor]]:
        """A step's batches on the device, in one copy that lies on the link before all that the step fetches; they are
        right until the next call. What has gaps stays on the host. `packed`: pinned memory of `packed_bytes(batches)`,
        which is filled here. The first call takes room on the device, of `least_bytes` at least; later ones use it
        again."""
        tensors, size = _packable(batches), len(packed)
        for tensor, place in zip(tensors, _places(packed, tensors), strict=True):
            place.copy_(tensor)
        if self._room is None or len(self._room) < size:
            self._hosts, self._room = {}, None
            self._room = torch.empty(max(size, least_bytes), dtype=torch.uint8, device=self._device)
            self._up.wait_stream(self._computing)  # whoever had the memory before
        else:
            self._up.wait_event(self._read)
        with torch.cuda.stream(self._up):
            self._room[:size].copy_(packed, non_blocking=True)
        self._computing.wait_stream(self._up)
        there, hosts = list(_places(self._room, tensors)), list(_places(packed, tensors))
        found = dict(zip(map(id, tensors), there, strict=True))
        self._hosts = {id(pair[0]): pair for pair in zip(there, hosts, strict=True)}
        return [{name: found.get(id(t), t) for name, t in batch.items()} for batch in batches]

    def were_read(self) -> None:
        """Each slice copies its batch out of the room in its forward; nothing reads the room after the last forward.
        Called when that is issued."""
        self._read.record(self._computing)

    def on_host(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Of the tensors of a staged batch those on the device, each with the one on the host that it is a copy of."""
        return [self._hosts[id(t)] for t in batch.values() if id(t) in self._hosts]

    def forget_batches(self) -> None:
        """Give the room back, and what was copied last. Nothing of a step may be running."""
        self._let_go()
        self._room, self._hosts = None, {}


def packed_bytes(batches: Sequence[Batch]) -> int:
    """What the tensors that `SmallCopies.stage` copies take beside each other."""
    return sum(staged_size(tensor.nbytes) for tensor in _packable(batches))


def _packable(batches: Sequence[Batch]) -> list[Tensor]:
    """Tensors on the host without gaps."""
    return [t for batch in batches for t in batch.values() if t.is_cpu and t.is_contiguous()]


def _places(room: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Where each of `tensors` lies in bytes."""
    start = 0
    for tensor in tensors:
        yield room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += staged_size(tensor.nbytes)

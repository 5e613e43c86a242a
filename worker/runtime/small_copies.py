"""Makes small copies between host and device, on CUDA streams of their own.

A copy engine does one copy after another. On the computing stream, four bytes that go to the host after a weight would
make all computation wait for as long as the weight takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.schedule.peak_moments import staged_size
from worker.runtime.machine import Batch


class SmallCopies:
    """Makes the small copies between one CUDA device and its host. Only the computing thread calls its methods, on the
    stream `computing`."""

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
        """Start copying `source`, which was just computed, to `target` in page-locked host memory. Returns a function
        that waits on the host until the copy is done; call it before reading `target`. All reading must be over before
        the next copy to the same target."""
        self._let_go()
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._down.wait_stream(self._computing)
        with torch.cuda.stream(self._down):
            target.copy_(source, non_blocking=True)
        copied.record(self._down)
        self._sent = source, copied
        return copied.synchronize

    def _let_go(self) -> None:
        """Drop what was copied last. The computing stream uses its memory again only behind that copy."""
        if self._sent is not None:
            self._computing.wait_event(self._sent[1])
            self._sent = None

    def stage(self, batches: Sequence[Batch], packed: Tensor, least_bytes: int) -> list[dict[Any, Tensor]]:
        """Copy a step's `batches`, one per slice, to the device in one transfer, which goes over the link before all
        that the step fetches. The results are valid until the next call. Tensors with gaps stay on the host. `packed`:
        pinned memory of `packed_bytes(batches)` bytes, which is filled here. The first call allocates at least
        `least_bytes` bytes on the device; later calls use them again if they are enough."""
        tensors, size = _packable(batches), len(packed)
        for tensor, place in zip(tensors, _places(packed, tensors), strict=True):
            place.copy_(tensor)
        if self._room is None or len(self._room) < size:
            self._hosts, self._room = {}, None
            self._room = torch.empty(max(size, least_bytes), dtype=torch.uint8, device=self._device)
            self._up.wait_stream(self._computing)  # the memory's last user may still run
        else:
            self._up.wait_event(self._read)
        with torch.cuda.stream(self._up):
            self._room[:size].copy_(packed, non_blocking=True)
        self._computing.wait_stream(self._up)
        on_device, hosts = list(_places(self._room, tensors)), list(_places(packed, tensors))
        copy_of = dict(zip(map(id, tensors), on_device, strict=True))
        self._hosts = {id(pair[0]): pair for pair in zip(on_device, hosts, strict=True)}
        return [{name: copy_of.get(id(t), t) for name, t in batch.items()} for batch in batches]

    def were_read(self) -> None:
        """Note, when a step's last forward is issued, that nothing reads the device memory of `stage` any more: each
        slice has copied its batch out of it in its forward."""
        self._read.record(self._computing)

    def on_host(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Pairs (tensor on the device, host tensor of the same values) for the tensors of `batch`, a result of `stage`,
        that are on the device."""
        return [self._hosts[id(t)] for t in batch.values() if id(t) in self._hosts]

    def forget_batches(self) -> None:
        """Free the device memory of `stage`, and drop the last batches. Must be called between steps."""
        self._let_go()
        self._room, self._hosts = None, {}


def packed_bytes(batches: Sequence[Batch]) -> int:
    """The number of bytes of all tensors that `SmallCopies.stage` copies to the device, packed one after another."""
    return sum(staged_size(tensor.nbytes) for tensor in _packable(batches))


def _packable(batches: Sequence[Batch]) -> list[Tensor]:
    """Tensors on the host without gaps."""
    return [t for batch in batches for t in batch.values() if t.is_cpu and t.is_contiguous()]


def _places(room: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """For each of `tensors` its part of `room`, one after another, with its dtype and shape."""
    start = 0
    for tensor in tensors:
        yield room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += staged_size(tensor.nbytes)

"""Says how long operations take by their arithmetic, their memory traffic and a machine's rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.machine.hardware import Hardware
from planner.machine.traffic import UPDATE_TRAFFIC_BYTES


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operation: its floating point operations, and the bytes that it reads and writes."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionWork:
    """The operations of one block of `kind` for one micro-batch under `option`, a way to treat its activations. The
    head's forward includes the loss."""

    kind: str
    option: str
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


def seconds_of(work: Iterable[Work], hardware: Hardware) -> float:
    """The seconds that operations take one after the other on the device of `hardware`: each takes as long as its
    arithmetic or its memory traffic, whichever is longer."""
    # The device's memory rate is the rate of its updates, which do nothing but move bytes.
    bytes_per_s = UPDATE_TRAFFIC_BYTES * hardware.gpu_update_parameters_per_s
    flops_per_s = hardware.flops_per_s
    return sum(max(w.bytes / bytes_per_s, w.flops / flops_per_s if flops_per_s else 0.0) for w in work)

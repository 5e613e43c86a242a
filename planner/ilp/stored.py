"""Which optimizer states may be on disk, in numbers of the O-ILP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.candidate.trailing import trailing_bytes
from planner.schedule.chain import Chain, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Which states may be on disk. Lists are per block, scaled; of weights, and of the states of these."""

    may: list[float]
    must: list[float]  # where the CPU updates them
    trails: list[float]  # of `may`, whose states can be a step behind the weight (`Tensor.can_trail`)
    may_states: list[float]
    must_states: list[float]
    whole: list[int]  # blocks of one tensor: embedding and head, each larger than all of a layer
    ratio: float  # bytes of states per byte of weight
    beside_ratio: float  # as an instance's `host_gradient_ratio`, of tensors whose states are on disk
    trailing_ratio: float  # more of it where states trail their weights, as the gradient then has memory of its own
    wholly: float  # of `may`, the part of weights that are wholly on disk
    room: float | None  # for the states of all blocks; None where it is decided which are there


def stored_of(
    chain: Chain, trainable: Sequence[Sequence[Tensor]], rounds: int, unit_bytes: float, *, anywhere: bool,
    room_bytes: int,
) -> Stored | None:  # fmt: skip
    """Of the trainable tensors that may leave; None where no states may be on disk. `anywhere`: those of every tensor
    may be there or not, of all together `room_bytes`; else those of the chosen ones are."""
    if not any(t.states_on_disk for tensors in trainable for t in tensors):
        return None
    may = [[t for t in tensors if (t.storable if anywhere else t.states_on_disk)] for tensors in trainable]
    must: list[list[Tensor]] = [[] for _ in may] if anywhere else may
    every = [t for tensors in may for t in tensors]
    weights = max(1, sum(t.bytes for t in every))
    return Stored(
        may=[sum(t.bytes for t in tensors) / unit_bytes for tensors in may],
        must=[sum(t.bytes for t in tensors) / unit_bytes for tensors in must],
        trails=[sum(t.bytes for t in tensors if t.can_trail) / unit_bytes for tensors in may],
        may_states=[sum(t.state_bytes for t in tensors) / unit_bytes for tensors in may],
        must_states=[sum(t.state_bytes for t in tensors) / unit_bytes for tensors in must],
        whole=[i for i, tensors in enumerate(trainable) if len(tensors) == 1],
        ratio=sum(t.state_bytes for t in every) / weights,
        beside_ratio=sum(beside_bytes(chain, t, rounds, stored=True) for t in every) / weights,
        trailing_ratio=sum(trailing_bytes(t, rounds) for t in every) / weights,
        wholly=sum(t.bytes for t in every if t.on_disk) / weights,
        room=min(room_bytes, sum(t.state_bytes for t in every)) / unit_bytes if anywhere else None,
    )


def beside_bytes(chain: Chain, tensor: Tensor, rounds: int, *, stored: bool) -> int:
    """What the host has for a CPU update beside the working copy and states of full size, where these are on disk, and
    where they are not."""
    placed = tensor.with_states(on_disk=stored and tensor.state_bytes > 0)
    return tensor.host_gradient_bytes(rounds) - chain.packed_bytes(placed, rounds)

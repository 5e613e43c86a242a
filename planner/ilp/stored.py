"""Computes which optimizer states may be on disk, in scaled numbers for the integer program (O-ILP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.candidate.trailing import trailing_bytes
from planner.schedule.chain import Chain, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Which optimizer states may be on disk. Lists are per block, in scaled bytes of weights; `…_states` are bytes of
    the states of these weights."""

    may: list[float]
    must: list[float]  # weights whose states are on disk if the CPU updates them
    trails: list[float]  # part of `may` whose states can be a step behind the weight (`Tensor.can_trail`)
    may_states: list[float]
    must_states: list[float]
    whole: list[int]  # blocks that are one tensor: embedding and head, each larger than a whole layer
    ratio: float  # bytes of states per byte of weight
    beside_ratio: float  # an instance's `host_gradient_ratio`, for tensors whose states are on disk
    trailing_ratio: float  # added where states trail, as the gradient then has memory of its own
    wholly: float  # the fraction of `may` whose weights are wholly on disk
    room: float | None  # on disk, for the states of all blocks; None: it is decided which are there


def stored_of(
    chain: Chain,
    trainable: Sequence[Sequence[Tensor]],
    rounds: int,
    unit_bytes: float,
    *,
    anywhere: bool,
    room_bytes: int,
) -> Stored | None:
    """Which states of the trainable tensors that may leave the device may be on disk; None if none may.

    `trainable`: those tensors, per block. `anywhere`: the solver decides for every storable tensor whether its states
    are on disk, within `room_bytes` for all together. Otherwise the states of exactly the tensors that the chain names
    are on disk.
    """
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
    """Bytes that a CPU update of `tensor` takes on the host in addition to the working copy and unpacked states;
    negative if packing saves more. `stored`: the tensor's states are on disk."""
    placed = tensor.with_states(on_disk=stored and tensor.state_bytes > 0)
    return tensor.host_gradient_bytes(rounds) - chain.packed_bytes(placed, rounds)

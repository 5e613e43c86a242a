"""Chooses which of a candidate's CPU updates run ahead, that is, before the gradient norm is known.

With clipping an update waits for the norm of all gradients, so the CPU idles during the backward pass. An update ahead
starts when its gradient has come, as if the norm did not clip. It writes to other memory than it reads, so that it can
be repeated if the norm does clip. Its price is this memory and a little more traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.candidate.candidate import Candidate, Side, TensorSchedule, backward_stage
from planner.schedule.chain import Chain, Tensor

_PARTS = 4


def ahead_bytes(chain: Chain, tensor: Tensor, rounds: int) -> int:
    """Additional bytes on the host if the CPU updates a tensor before the gradient norm is known, so that the update
    can be repeated.

    They are a second master and moments, and memory of its own for the gradient (otherwise it may overwrite the working
    copy), less the bytes that packed states save.
    """
    beside = tensor.gradient_bytes - tensor.host_gradient_bytes(rounds)
    packed = chain.packed_bytes(tensor, rounds, ahead=True) - chain.packed_bytes(tensor, rounds)
    return tensor.master_bytes + beside - packed


def ahead_of_norm(chain: Chain, candidate: Candidate, *, rounds: int, host_bytes: int) -> Iterator[Candidate]:
    """The candidate with some CPU updates before the gradient norm is known: a quarter to all of those for which
    `host_bytes` more host memory are enough.

    Tensors whose gradients come first are chosen first. Yields nothing if no update can run so early. Repeating an
    update takes longer than waiting for the norm, so waiting may be better for what the next step needs first.
    """
    last = 2 * len(chain.blocks) - 2
    users = chain.users()
    stages = {j.tensor.name: _earliest(chain, users[j.tensor.name][0], j) for j in candidate.schedules}
    chosen: list[str] = []
    for schedule in sorted(candidate.schedules, key=lambda j: stages[j.tensor.name] or 0):
        tensor, stage = schedule.tensor, stages[schedule.tensor.name]
        if stage is not None and stage < last and ahead_bytes(chain, tensor, rounds) <= host_bytes:
            host_bytes -= ahead_bytes(chain, tensor, rounds)
            chosen.append(tensor.name)
    for count in sorted({-(-len(chosen) * part // _PARTS) for part in range(1, _PARTS + 1)} - {0}):
        names = frozenset(chosen[:count])
        schedules = (
            replace(j, update=stages[j.tensor.name]) if j.tensor.name in names else j for j in candidate.schedules
        )
        yield replace(candidate, schedules=tuple(schedules))


def _earliest(chain: Chain, block: int, schedule: TensorSchedule) -> int | None:
    """The first stage in which an update before the norm could run: after the gradient is sent and the weight released.
    None for tensors that the CPU does not update or whose optimizer cannot update so, and for states on disk, where no
    old values are kept."""
    tensor = schedule.tensor
    if schedule.side is not Side.CPU or schedule.send is None or tensor.states_on_disk or not tensor.optimizer.ahead:
        return None
    backward = backward_stage(chain, block)
    return 1 + max([schedule.send, *(absence.evict for absence in schedule.weight if absence.evict >= backward)])

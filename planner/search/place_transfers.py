"""Makes schedules from the integer program's flows: assigns its bytes per stage to whole tensors, by earliest deadline.

The program says how many bytes of each kind move in each stage, and its constraints by Hall's theorem guarantee that
there are tensors to take them. Whole tensors leave the device no later than the program's bytes and come back no
earlier, so a plan of whole tensors needs no more memory than the program's. A tensor that would miss its deadline moves
in the very stage that needs it, which costs time but never memory.

Positions are those of `planner.ilp.program`, for a chain of L blocks: u, for moves after backward, counts stages from
the head's stage (L - 1) on, into the next step; v, for moves after forward, is the stage itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.candidate.candidate import Absence, Side, TensorSchedule
from planner.candidate.setting import Setting
from planner.ilp.program import Solution
from planner.search.placements import Placement

_TOLERANCE = 1e-6  # share of all bytes of a kind by which the solver may round


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A tensor of `size` bytes that must be moved at some position from `release` to `deadline`, both included.
    Positions are numbers of stages, each one block's forward or backward."""

    name: str
    size: int
    release: int
    deadline: int


def hand_out(amounts: Sequence[float], jobs: Sequence[Job], *, eager: bool, new_last: bool = False) -> dict[str, int]:
    """Return the position (a number of a stage) at which each job's tensor moves, by the job's name. Up to each
    position, the sizes of the moved tensors sum to at least the given `amounts` (bytes per position) if `eager`, else
    to at most these.

    Jobs are taken by earliest deadline. With `new_last`, a job released at a position comes after those that waited
    already, because a running block makes its gradients at the stage's end. A job that reaches its deadline moves there
    in any case.
    """
    slack = _TOLERANCE * sum(job.size for job in jobs)
    position: dict[str, int] = {}
    left = sorted(jobs, key=lambda job: (job.deadline, job.name))
    due = handed = 0.0
    for u in range(max([len(amounts), *(job.deadline + 1 for job in jobs)])):
        due += amounts[u] if u < len(amounts) else 0.0
        ready = [job for job in left if job.release <= u]
        if new_last:
            ready.sort(key=lambda job: job.release == u)
        for job in ready:
            wanted = handed < due - slack if eager else handed + job.size <= due + slack
            if wanted or job.deadline <= u:
                position[job.name] = u
                handed += job.size
        left = [job for job in left if job.name not in position]
    return position


@dataclass(frozen=True, slots=True)
class _Circle:
    """Positions and stages of a chain of L blocks."""

    blocks: int

    @property
    def stages(self) -> int:
        return 2 * self.blocks - 1

    def stage(self, u: int) -> int:
        """Return the stage at position `u` of moves after backward."""
        return (u + self.blocks - 1) % self.stages

    def backward(self, block: int) -> int:
        """Return the position of a block's backward."""
        return self.blocks - 1 - block

    def forward(self, block: int) -> int:
        return self.blocks + block


def timed_schedules(setting: Setting, placements: Sequence[Placement], solution: Solution) -> list[TensorSchedule]:
    """Return a schedule for each tensor's placement (who updates it, and when it is off the device): the stages of its
    transfers and its update, by the bytes per stage in the integer program's `solution`."""
    chain, clip, rounds = setting.chain, setting.clip, setting.rounds
    circle = _Circle(len(chain.blocks))
    weights_sent, updates, gradients_sent, back = _after_backward(circle, placements, solution, clip)
    states = _state_absences(circle, placements, solution, clip)
    forward_absences = _after_forward(circle, placements, solution, weights_sent)
    schedules = []
    for placement in placements:
        name, absences = placement.tensor.name, []
        if placement.after_backward:
            leave = circle.backward(placement.block) if placement.side is not Side.GPU else weights_sent[name]
            if back[name] > leave + 1 or placement.side is not Side.NOBODY:
                offload = circle.stage(leave) if placement.side is Side.GPU else None
                absences.append(Absence(evict=circle.stage(leave), prefetch=circle.stage(back[name]), offload=offload))
        if name in forward_absences:
            absences.append(forward_absences[name])
        if placement.side is Side.CPU:
            sent = circle.stage(gradients_sent[name])
            update = circle.stage(min(updates[name], back[name] - 1))
            schedules.append(
                TensorSchedule(
                    tensor=placement.tensor,
                    side=Side.CPU,
                    update=update,
                    send=sent,
                    drop=sent,
                    weight=tuple(absences),
                    # a stage before its use, as in the solver's rows
                    fetch=circle.stages - 2 - placement.block if rounds > 1 else None,
                )
            )
            continue
        last = None if placement.side is Side.NOBODY else circle.stages - 1 - (0 if clip else placement.block)
        schedules.append(
            TensorSchedule(
                tensor=placement.tensor,
                side=placement.side,
                update=last,
                weight=tuple(absences),
                states=states.get(name, ()),
            )
        )
    return schedules


def _after_backward(
    circle: _Circle, placements: Sequence[Placement], solution: Solution, clip: bool
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int]]:
    """Return four dictionaries from a tensor's name to a position: when its weight is sent to the host, when it is
    updated, when its gradient is sent, and when the weight is fetched for the next forward."""
    L = circle.blocks
    names = {f.tensor.name: f for f in placements}

    def jobs(kind: Side, release: dict[str, int], deadline: dict[str, int]) -> list[Job]:
        return [
            Job(name=name, size=f.tensor.bytes, release=release[name], deadline=deadline[name])
            for name, f in names.items()
            if f.side is kind and f.after_backward
        ]

    made = {name: circle.backward(f.block) for name, f in names.items()}
    needed = {name: circle.forward(f.block) for name, f in names.items()}
    end_of_step = dict.fromkeys(names, L - 1)
    gradients = hand_out(solution.flows["send_X"], jobs(Side.CPU, made, end_of_step), eager=True, new_last=True)
    arrived = {name: L if clip else max(u, made[name] + 1) for name, u in gradients.items()}
    in_time = {name: max(arrived[name], needed[name] - 1) for name in gradients}
    updates = hand_out(solution.flows["update"], jobs(Side.CPU, arrived, in_time), eager=True)
    if clip:
        updates = dict.fromkeys(updates, L - 1)  # at the end of block 0's backward, in order of need
    # The earliest fetch is in the stage after the gradient was sent: the update is listed before the fetch. Block 0's
    # weight is read in that very stage, which waits for gradient, update and fetch.
    fresh = {name: min(max(updates[name], gradients[name]) + 1, needed[name]) for name in updates}
    back = hand_out(solution.flows["fetch_X"], jobs(Side.CPU, fresh, needed), eager=False)
    before = {name: u - 1 for name, u in needed.items()}
    sent = hand_out(solution.flows["send_N"], jobs(Side.GPU, made, before), eager=True, new_last=True)
    gone = {name: u + 1 for name, u in sent.items()}
    back |= hand_out(solution.flows["fetch_N"], jobs(Side.GPU, gone, needed), eager=False)
    left = {name: u + 1 for name, u in made.items()}
    back |= hand_out(solution.flows["fetch_R"], jobs(Side.NOBODY, left, needed), eager=False)
    return sent, updates, gradients, back


def _after_forward(
    circle: _Circle, placements: Sequence[Placement], solution: Solution, weights_sent: dict[str, int]
) -> dict[str, Absence]:
    """Return each weight's absence between its forward and its backward, by name. All numbers are stages, not
    positions."""
    leaving = [f for f in placements if f.after_forward]
    early = [f for f in leaving if f.send == "D"]
    late = [f for f in leaving if f.send == "K"]
    needed = {f.tensor.name: circle.stages - 1 - f.block for f in leaving}

    def job(placement: Placement, release: int, deadline: int) -> Job:
        return Job(name=placement.tensor.name, size=placement.tensor.bytes, release=release, deadline=deadline)

    jobs = [job(f, circle.backward(f.block), circle.forward(f.block)) for f in early]
    sent = hand_out(solution.flows["send_D"], jobs, eager=True, new_last=True)
    offload = {name: circle.stage(u) for name, u in sent.items()}
    after = hand_out(
        solution.flows["send_K"], [job(f, f.block + 1, needed[f.tensor.name] - 1) for f in late], eager=True
    )
    offload |= after
    evict = {f.tensor.name: after.get(f.tensor.name, f.block) for f in leaving}
    fetched = hand_out(
        solution.flows["fetch_E"],
        [job(f, evict[f.tensor.name] + 1, needed[f.tensor.name]) for f in leaving],
        eager=False,
    )
    return {
        name: Absence(evict=evict[name], prefetch=fetched[name], offload=offload.get(name))
        for name in fetched
        if fetched[name] > evict[name] + 1 or name in offload
    }


def _state_absences(
    circle: _Circle, placements: Sequence[Placement], solution: Solution, clip: bool
) -> dict[str, tuple[Absence, ...]]:
    """Return the absences of optimizer states, by tensor name. States move first in, first out, in their order of use.
    The order is cyclic: at the end it continues with the first states."""
    tape = sorted((f for f in placements if f.states_travel), key=lambda f: (-f.block, f.tensor.name))
    total = sum(f.tensor.state_bytes for f in tape)
    slack = _TOLERANCE * total
    T = circle.stages
    sent = _running(solution.flows["send_Y"], -solution.states_waiting_bytes)
    fetched = _running(solution.flows["fetch_Y"], solution.states_back_bytes)
    absences: dict[str, tuple[Absence, ...]] = {}
    start = 0
    for placement in tape:
        size = placement.tensor.state_bytes
        end = start + size
        use = circle.blocks - 1 if clip else circle.backward(placement.block)
        mark = start if start < total - solution.states_waiting_bytes - slack else start - total
        send = next((u for u in range(T) if sent[u] > mark + slack), T - 1)
        mark = end if end > solution.states_back_bytes + slack else end + total
        fetch = next((u for u in range(T) if fetched[u] >= mark - slack), T - 1)
        kept = (send - use) % T  # stages from the use to the copy; `away`: to the return
        away = (fetch - use) % T or T
        if mark == end and fetch > use:
            away = T
        if away > kept + 1:
            stage = circle.stage(use + kept)
            absences[placement.tensor.name] = (Absence(evict=stage, prefetch=circle.stage(use + away), offload=stage),)
        start = end
    return absences


def _running(amounts: Sequence[float], start: float) -> list[float]:
    sums = []
    for amount in amounts:
        start += amount
        sums.append(start)
    return sums

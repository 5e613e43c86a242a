"""Makes a candidate fit the device's memory: in stages that need too much, tensors that are there but not used come
back later or leave earlier.

Whole tensors may not fit where the integer program's fractions of them did. Of the tensors that are on the device
without being read, the one whose next use is farthest away is moved first. It then comes back after the crowded stage,
at the latest in the stage that reads it, or leaves before the crowded stage, at the earliest in the stage that makes
it. This costs time and never memory. What a stage itself reads stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.candidate.candidate import Absence, Candidate, Side, TensorSchedule, backward_stage
from planner.schedule.chain import Chain


class _Stages:
    """The stages in which each tensor is used, and the free bytes of each stage."""

    def __init__(self, chain: Chain, room_bytes: Sequence[int]) -> None:
        self.room = list(room_bytes)
        self.count = len(self.room)
        self.uses = {
            name: [*blocks, *(backward_stage(chain, block) for block in blocks)]
            for name, blocks in chain.users().items()
        }

    def until(self, stage: int, uses: Sequence[int]) -> int:
        """Return the number of stages from `stage` to the next of `uses`."""
        return min((use - stage) % self.count for use in uses)

    def since(self, stage: int, uses: Sequence[int]) -> int:
        """Return the number of stages from the last of `uses` to `stage`."""
        return min((stage - use) % self.count for use in uses)

    def give(self, first: int, stages: int, size: int) -> None:
        """Add `size` to the free bytes of `stages` stages, from stage `first` on."""
        for n in range(stages):
            self.room[(first + n) % self.count] += size


def tightened(chain: Chain, candidate: Candidate, room_bytes: Sequence[int]) -> Candidate:
    """Return the candidate plan with fewer bytes on the device in stages that have too little memory, as far as
    possible. `room_bytes`: for each stage (one block's forward or backward), the budget minus the bytes needed at its
    peak; below zero where the candidate does not fit."""
    stages = _Stages(chain, room_bytes)
    schedules = {schedule.tensor.name: schedule for schedule in candidate.schedules}
    for stage in range(stages.count):
        if stages.room[stage] >= 0:
            continue
        waiting = [
            (ahead, name, kind)
            for name, schedule in schedules.items()
            for ahead, kind in _waiting(stages, schedule, stage)
        ]
        for _, name, kind in sorted(waiting, reverse=True):
            if stages.room[stage] >= 0:
                break
            schedules[name] = _moved(stages, schedules[name], kind, stage)
    return replace(candidate, schedules=tuple(schedules[schedule.tensor.name] for schedule in candidate.schedules))


def _waiting(stages: _Stages, schedule: TensorSchedule, stage: int) -> list[tuple[int, str]]:
    """Return the parts of a tensor that are on the device in `stage` without being used, as (stages until its use,
    kind) pairs. Kind "w" is its weight, "s" its optimizer states, "g" its gradient."""
    found: list[tuple[int, str]] = []
    if schedule.drop is not None and schedule.send is not None and _made(stages, schedule) < stage <= schedule.drop:
        found.append((stages.count, "g"))
    elif schedule.fetch is not None and schedule.fetch <= stage < _made(stages, schedule):
        found.append((_made(stages, schedule) - stage, "g"))
    for kind, absences, uses in _kinds(stages, schedule):
        if any(
            _later(stages, schedule, absence, stage, uses) or _sooner(stages, absence, stage, uses)
            for absence in absences
        ):
            found.append((stages.until(stage, uses), kind))
    return found


def _kinds(stages: _Stages, schedule: TensorSchedule) -> list[tuple[str, tuple[Absence, ...], list[int]]]:
    """Return the kinds "w" (weight) and "s" (optimizer states), each with its absences and the stages that use it: for
    a weight those that read or update it, for states the one that updates them."""
    weight_uses, updates = list(stages.uses[schedule.tensor.name]), []
    if schedule.side is Side.GPU and schedule.update is not None:
        updates = [schedule.update]
    kinds = [("w", schedule.weight, [*weight_uses, *updates])]
    return [*kinds, ("s", schedule.states, updates)] if schedule.states else kinds


def _made(stages: _Stages, schedule: TensorSchedule) -> int:
    return max(stages.uses[schedule.tensor.name])


def _later(stages: _Stages, schedule: TensorSchedule, absence: Absence, stage: int, uses: list[int]) -> bool:
    """Return whether the absence could end later: it ends by `stage`, for a use after `stage`."""
    return (stage - absence.prefetch) % stages.count < stages.until(absence.prefetch, uses)


def _sooner(stages: _Stages, absence: Absence, stage: int, uses: list[int]) -> bool:
    """Return whether the absence could begin sooner: the last use was before `stage`, and the absence begins at the end
    of `stage` or later, before the next use."""
    since = stages.since(stage, uses)
    return (
        since > 0
        and (absence.evict - stage) % stages.count < stages.until(stage, uses)
        and (stages.since(absence.evict, uses) == since + (absence.evict - stage) % stages.count)
    )


def _moved(stages: _Stages, schedule: TensorSchedule, kind: str, stage: int) -> TensorSchedule:
    tensor = schedule.tensor
    if kind == "g":
        assert schedule.send is not None and schedule.drop is not None
        if schedule.fetch is not None and schedule.fetch <= stage < _made(stages, schedule):
            stages.give(schedule.fetch, stage + 1 - schedule.fetch, tensor.gradient_bytes)
            return replace(schedule, fetch=stage + 1)
        drop = max(_made(stages, schedule), stage - 1)
        stages.give(drop + 1, schedule.drop - drop, tensor.gradient_bytes)
        return replace(schedule, send=min(schedule.send, drop), drop=drop)
    size = tensor.bytes if kind == "w" else tensor.state_bytes
    [(_, absences, uses)] = [found for found in _kinds(stages, schedule) if found[0] == kind]
    moved = []
    for absence in absences:
        if _later(stages, schedule, absence, stage, uses):
            after = (stage - absence.prefetch) % stages.count + 1
            stages.give(absence.prefetch, after, size)
            absence = replace(absence, prefetch=(stage + 1) % stages.count)
        if _sooner(stages, absence, stage, uses):
            before = (stage - 1) % stages.count
            stages.give(stage, (absence.evict - before) % stages.count, size)
            offload = absence.offload
            if offload is not None and stages.since(offload, uses) > stages.since(before, uses):
                offload = before
            absence = replace(absence, evict=before, offload=offload)
        moved.append(absence)
    return replace(schedule, weight=tuple(moved)) if kind == "w" else replace(schedule, states=tuple(moved))

"""Defines candidates: a schedule per tensor that says when the tensor is on the device, and the plan made of all
schedules.

Every candidate, whether found by a heuristic or a solver, is a list of schedules. `assemble` writes them into the
stages of a `Plan`. Stages are numbered 0 … T-1 in `stage_order`; T = 2L - 1 for L blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from planner.machine.hardware import Hardware
from planner.schedule.chain import Chain, Tensor
from planner.schedule.items import STATES, WEIGHT, Item
from planner.schedule.plan import Direction, Plan, Stage, stage_order


class Side(StrEnum):
    """Who updates a tensor: the CPU, the GPU, or nobody, if it is frozen."""

    CPU = "cpu"
    GPU = "gpu"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """An absence from the device, from the end of stage `evict` to stage `prefetch`, which may be in the next step.

    `offload`: the stage in which the item is copied to the host before; None if the host's copy is current.
    """

    evict: int
    prefetch: int
    offload: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSchedule:
    """What happens to one tensor in a step; numbers are those of stages. `side`: who updates it. `update`: the stage at
    which the update is listed. `send`: the stage that copies the gradient to the host. `drop`: the stage that releases
    the gradient's device copy. If the GPU updates the tensor, these two apply only between rounds. `fetch`: the stage
    that brings the gradient back for the next round (None: the stage that adds to it). `trails`: its states on disk are
    updated in the next step. `weight`, `states`: the absences of the weight and of the optimizer states from the
    device."""

    tensor: Tensor
    side: Side
    update: int | None = None
    send: int | None = None
    drop: int | None = None
    fetch: int | None = None
    trails: bool = False
    weight: tuple[Absence, ...] = ()
    states: tuple[Absence, ...] = ()


def backward_stage(chain: Chain, block: int) -> int:
    """The number of the stage that runs the backward of `block`."""
    return 2 * (len(chain.blocks) - 1) - block


def movable(chain: Chain, hardware: Hardware) -> list[list[Tensor]]:
    """Per block, the tensors that may leave the device: those that only this block uses and that are large enough for a
    transfer."""
    users = chain.users()
    return [
        [t for t in block.tensors if len(users[t.name]) == 1 and t.bytes >= max(1, hardware.min_transfer_bytes)]
        for block in chain.blocks
    ]


def settled(chain: Chain, hardware: Hardware) -> list[list[Tensor]]:
    """Per block, the tensors whose optimizer states may leave the device, but not the weight, because later blocks use
    it, too. Each is listed at the first block that uses it."""
    users = chain.users()
    return [
        [
            t
            for t in block.tensors
            if t.trainable
            and users[t.name][0] == index < users[t.name][-1]
            and t.state_bytes >= hardware.min_transfer_bytes
        ]
        for index, block in enumerate(chain.blocks)
    ]


def at_home(chain: Chain, tensor: Tensor, clip: bool) -> TensorSchedule:
    """The schedule of a tensor that is always on the device. The device updates it as soon as its gradient is complete;
    with clipping, at the step's end. A frozen tensor is not updated."""
    if not tensor.trainable:
        return TensorSchedule(tensor=tensor, side=Side.NOBODY)
    first = chain.users()[tensor.name][0]
    return TensorSchedule(tensor=tensor, side=Side.GPU, update=backward_stage(chain, 0 if clip else first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate for the plan: an option name per block and a schedule per tensor. `source`: the method that proposed
    it. `copy_turns`: that of `Plan`."""

    options: tuple[str, ...]
    schedules: tuple[TensorSchedule, ...]
    source: str
    copy_turns: int = 1


WORDS = ("prefetch", "offload", "evict", "cpu_update", "gpu_update", "states_update")


class Entry(NamedTuple):
    """An item, or a tensor's name, in one of a stage's lists. A list is sorted by urgency, then by number and place.
    `word`: which list ("prefetch", "evict", …). `number`: the index of the schedule in its candidate. `place`: the
    index among the schedule's entries."""

    stage: int
    word: str
    urgency: int
    number: int
    place: int
    item: str


def entries_of(chain: Chain, schedule: TensorSchedule, number: int, *, rounds: int) -> list[Entry]:
    """What one schedule puts into the lists of the stages. `number`: the schedule's index in its candidate."""
    entries: list[Entry] = []
    stages = 2 * len(chain.blocks) - 1
    name = schedule.tensor.name
    blocks = chain.users()[name]
    backward = [backward_stage(chain, block) for block in blocks]

    def put(stage: int, word: str, urgency: int, item: str) -> None:
        entries.append(Entry(stage, word, urgency, number, len(entries), item))

    def travel(item: Item, absences: tuple[Absence, ...], uses: Sequence[int]) -> None:
        for absence in absences:
            due = min([(use - absence.prefetch) % stages for use in uses])
            # States are read at the stage's end, by the update.
            put(absence.prefetch, "prefetch", 2 * due + (item.kind == STATES), item)
            put(absence.evict, "evict", due, item)
            if absence.offload is not None:
                put(absence.offload, "offload", (absence.prefetch - absence.offload) % stages + due, item)

    travel(Item.weight(name), schedule.weight, [*blocks, *backward])
    if schedule.side is Side.GPU:
        assert schedule.update is not None
        put(schedule.update, "gpu_update", 0, name)
        if schedule.drop is None or schedule.drop < schedule.update:
            put(schedule.update, "evict", 0, Item.gradient(name))
        travel(Item.states(name), schedule.states, [schedule.update])
    elif schedule.side is Side.CPU:
        assert schedule.update is not None and schedule.send is not None
        put(schedule.update, "cpu_update", blocks[0], name)
        if schedule.trails:  # the drive first does what this step's forward needs
            put(0, "states_update", stages - blocks[0], name)
    if schedule.send is not None:
        assert schedule.drop is not None
        put(schedule.send, "offload", 0, Item.gradient(name))  # urgency 0, first in the list: the CPU waits for it
        put(schedule.drop, "evict", 0, Item.gradient(name))
        if rounds > 1:
            fetch = backward[0] if schedule.fetch is None else schedule.fetch
            put(fetch, "prefetch", 2 * (backward[0] - fetch), Item.gradient(name))
    return entries


def _residents(schedule: TensorSchedule) -> list[Item]:
    """The items of its tensor that are on the device when a step begins."""
    items = [(WEIGHT, schedule.weight)] + ([(STATES, schedule.states)] if schedule.side is Side.GPU else [])
    return [
        Item.of(kind, schedule.tensor.name)
        for kind, absences in items
        if all(absence.prefetch > absence.evict for absence in absences)
    ]


def assemble(chain: Chain, candidate: Candidate, *, slices: int, clip: bool, rounds: int = 1) -> Plan:
    """The plan in which every tensor follows its schedule in `candidate`. Within a stage, items are in the order of
    their next use."""
    lists: list[dict[str, list[Entry]]] = [{word: [] for word in WORDS} for _ in range(2 * len(chain.blocks) - 1)]
    for number, schedule in enumerate(candidate.schedules):
        for entry in entries_of(chain, schedule, number, rounds=rounds):
            lists[entry.stage][entry.word].append(entry)
    stages = tuple(
        stage_of(block, direction, words)
        for (direction, block), words in zip(stage_order(len(chain.blocks)), lists, strict=True)
    )
    resident = tuple(item for schedule in candidate.schedules for item in _residents(schedule))
    return Plan(
        stages=stages,
        options=candidate.options,
        resident=resident,
        slices=slices,
        rounds=rounds,
        clip=clip,
        copy_turns=candidate.copy_turns,
        source=candidate.source,
    )


def stage_of(block: int, direction: Direction, words: Mapping[str, Sequence[Entry]]) -> Stage:
    """The stage with these lists, each sorted; `words` maps the name of a list ("prefetch", …) to its entries."""
    lists: dict[str, Any] = {word: tuple([each.item for each in sorted(entries)]) for word, entries in words.items()}
    return Stage(block=block, direction=direction, **lists)

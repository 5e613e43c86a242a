"""Decides when offloaded activations come back and are released, and how those on disk pass through host memory. A turn
is one block's run on one slice (micro-batch); turns are numbered from 0 through all stages."""

from __future__ import annotations

from planner.schedule.chain import Chain
from planner.schedule.items import Item
from planner.schedule.operations import ACTIVATION_SLOTS, activation_slots, ring_at_turn
from planner.schedule.plan import Plan

_Turns = dict[int, list[tuple[Item, int]]]


class StoredActivations:
    """The activations that go to disk and come back in each round, and the host memory slots through which they pass.

    Forward uses the slots in rotation. The activations that backward fetches first are still in their slots when it
    begins: they stay there and are not written. Each later item is read into a slot as soon as another item has been
    fetched from it. A turn is one block's run on one slice.

    slots       item -> its slot on its way from the device; items in `reads` have another slot on their way back
    sizes       item -> bytes on disk, for items that are written
    reads       item -> the slot it is read into
    first       items that are read before any is fetched, from turn number `first_turn` on, which is the head's first
    after       item -> the item that is read into its slot when it has been fetched
    """

    def __init__(self, plan: Plan, chain: Chain, back_at: _Turns) -> None:
        options = [block.option(name) for block, name in zip(chain.blocks, plan.options, strict=True)]
        size = {
            Item.activations(i, k): option.stored_bytes
            for i, option in enumerate(options)
            if option.on_disk
            for k in range(plan.slices)
        }
        items = list(size)
        back = [item for turn in sorted(back_at) for item, _ in back_at[turn] if item in size] if items else []
        self.slots = dict(zip(items, activation_slots(), strict=False))
        stay = back[: ring_at_turn(plan.slices, len(items))]
        at = {item: self.slots[item] for item in stay}
        free = [self.slots[item] for item in items[-ACTIVATION_SLOTS:] if item not in at]
        self.first = back[len(stay) :][: len(free)]
        self.reads = dict(zip(self.first, free, strict=False))
        self.after = dict(zip(back, back[len(stay) + len(free) :], strict=False))
        for item, following in self.after.items():
            self.reads[following] = at[item] if item in at else self.reads[item]
        self.sizes = {item: size[item] for item in self.reads}
        self.first_turn = (len(chain.blocks) - 1) * plan.slices


def stored_activations(plan: Plan, chain: Chain) -> dict[Item, int]:
    """Maps each activations item that a round of the plan writes to disk to its bytes there."""
    if not any(block.option(name).on_disk for block, name in zip(chain.blocks, plan.options, strict=True)):
        return {}
    return StoredActivations(plan, chain, activation_turns(plan, chain)[0]).sizes


def activation_turns(plan: Plan, chain: Chain) -> tuple[_Turns, _Turns]:
    """Two maps from a turn number (a turn is one block's run on one slice) to offloaded activations, as pairs (item,
    bytes): those fetched before that turn, and those released after it.

    Activations are released `plan.copy_turns` turns after the forward that made them, and fetched so many turns before
    the backward that reads them. So the copies overlap with the computation of these turns. For those on disk, whose
    slots in host memory are few, it is one turn. Near the head it is at most half of the turns from forward to
    backward, so that the copy back has time, too.
    """
    numbers = {stage.name: n for n, stage in enumerate(plan.stages)}
    back: dict[int, list[tuple[Item, int]]] = {}
    free: dict[int, list[tuple[Item, int]]] = {}
    for index, block in reversed(list(enumerate(chain.blocks[:-1]))):  # what is needed first is fetched first
        option = block.option(plan.options[index])
        for k in range(plan.slices) if option.offloaded_bytes else ():
            forward = numbers[f"F{index}"] * plan.slices + k
            backward = numbers[f"B{index}"] * plan.slices + k
            turns = 1 if option.on_disk else min(plan.copy_turns, (backward - forward) // 2)
            moved = Item.activations(index, k), option.offloaded_bytes
            free.setdefault(forward + turns, []).append(moved)
            back.setdefault(max(forward + turns + 1, backward - turns), []).append(moved)
    return back, free
